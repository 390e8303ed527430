// A device without silicon: the threads of a grid, each with its own place in a kernel, in an order of
// chance; memory in which every access is looked at.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ptx_program.h"
#include "random.h"

namespace hkv::testing::ptx {

inline constexpr size_t kSector = 32;  // bytes that a cache asks memory for

// What a kernel's warps did: their instructions, the sectors that these asked for, and the different ones
// that a launch read and wrote.
struct Traffic {
  int64_t launches = 0, instructions = 0, requested = 0, read = 0, written = 0;
};

// Arrays of the device; new ones are full of garbage.
class Memory {
 public:
  Memory();

  void* allocate(size_t bytes);
  void free(void* address);
  // Whether all these bytes lie in one array.
  bool has(uintptr_t address, size_t bytes) const;

  // Whether traffic is counted, by kernel; threads then keep together for as long as they can.
  bool counts = false;
  std::map<std::string, Traffic> traffic;
  void begin_launch(const std::string& kernel);
  void count_instruction() { ++launched_->instructions; }
  // Of a warp's access, in any order.
  void count_sectors(std::vector<uintptr_t> sectors, bool reads, bool writes);

 private:
  struct Array {
    size_t bytes;
    std::vector<uint32_t> read, written;  // by sector: the last launch that did
  };

  std::map<uintptr_t, Array> arrays_;
  uint32_t launch_ = 0;
  Traffic* launched_ = nullptr;
  Random garbage_{1};
  mutable uintptr_t last_begin_ = 0, last_end_ = 0;
};

// What the warps of a block have in common.
struct Block {
  const Kernel* kernel;
  Memory* memory;
  const std::vector<char>* parameters;
  std::vector<char> shared;
  unsigned index = 0, blocks = 0, threads = 0;
};

class Warp {
 public:
  Warp(Block& block, int first_thread);

  // Some instructions of lanes that can go on; the least place first, mostly, so that lanes meet again.
  void run(int instructions, Random& random);

  uint64_t* values(int number) { return registers_.data() + static_cast<ptrdiff_t>(number) * kWarpLanes; }
  uint64_t value(int number, int lane) { return values(number)[lane]; }
  // Where an access goes; stops where it may not.
  char* locate(const Instruction& instruction, int lane);
  void count_access(const Instruction& instruction, uint32_t lanes, bool reads, bool writes);
  [[noreturn]] void fault(const Instruction& instruction, int lane, const std::string& what) const;

  std::string whereabouts() const;  // of lanes that have not ended

  bool can_go_on() const { return lanes_in(State::kReady) != 0; }
  bool has_ended() const { return lanes_in(State::kExited) == ~uint32_t{0}; }
  uint32_t at_block_barrier() const { return lanes_in(State::kAtBlockBarrier); }
  uint32_t not_exited() const { return ~lanes_in(State::kExited); }
  const Instruction& place_of(int lane) const { return code_[place_[lane]]; }
  void pass_block_barrier() { pass(at_block_barrier()); }

 private:
  enum class State : uint8_t { kReady, kWaiting, kAtBlockBarrier, kExited };

  uint32_t lanes_in(State state) const {
    uint32_t lanes = 0;
    for (int lane = 0; lane < kWarpLanes; ++lane) lanes |= uint32_t{state_[lane] == state} << lane;
    return lanes;
  }
  void leave(uint32_t lanes, int place, State state) {
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
      place_[std::countr_zero(rest)] = place;
      state_[std::countr_zero(rest)] = state;
    }
  }
  // Ready lanes at one place.
  enum class Choice { kLeast, kGreatest, kAny };
  uint32_t choose(Choice choice, Random& random) const;
  uint32_t guarded(const Instruction& instruction, uint32_t lanes);
  void turn(const Instruction& instruction, uint32_t lanes, int place);
  void arrive(const Instruction& instruction, uint32_t lanes, int place);
  void let_meet();
  void pass(uint32_t lanes);  // what they waited at
  std::string thread_at(const Instruction& instruction, int lane, const std::string& what) const;

  Block& block_;
  const std::vector<Instruction>& code_;
  const int first_thread_;
  std::vector<uint64_t> registers_;  // of all lanes, side by side
  std::vector<char> local_;
  std::array<int, kWarpLanes> place_{};
  std::array<State, kWarpLanes> state_{};
  std::array<uint32_t, kWarpLanes> waits_for_{};
};

// `shared`: bytes that the launch asks for, of each block.
void run_grid(const Kernel& kernel, unsigned blocks, unsigned threads, size_t shared,
              const std::vector<char>& parameters, Memory& memory, Random& random);

}  // namespace hkv::testing::ptx
