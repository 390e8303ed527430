// Kernels as nvcc hands them to ptxas: what of PTX (NVIDIA, "Parallel Thread Execution ISA", 9.0) the kernels
// of this project use, read into instructions that ptx_instructions.cc carries out. All operands are
// registers: constants, addresses of arrays and what a thread knows of itself lie in registers of their own.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace hkv::testing::ptx {

inline constexpr int kWarpLanes = 32;
inline constexpr int kNone = -1;

class Warp;
struct Instruction;
using Effect = void (*)(Warp&, const Instruction&, uint32_t lanes);

// An exchange waits for all lanes of its mask at this very instruction, a warp's barrier for all of its mask
// at any, a block's for all threads; at a pause others should have their turn.
enum class Kind { kPlain, kBranch, kExit, kExchange, kWarpBarrier, kBlockBarrier, kPause };

enum class Space { kGlobal, kShared, kLocal, kParameter };

struct Instruction {
  Kind kind = Kind::kPlain;
  Effect effect = nullptr;
  std::vector<int> out, in;  // registers, of whose 64 bits the type's count; kNone: nobody wants the result
  int guard = kNone;  // only lanes for which this predicate holds, or does not hold
  bool guard_is_negated = false;
  int target = 0;
  bool is_target = false;  // lanes may meet again here
  // Of an access to memory: in[0] + offset, so many elements of so many bytes.
  Space space = Space::kGlobal;
  int64_t offset = 0;
  int size = 0;
  int count = 1;
  bool is_signed = false;
  int line = 0;
  std::string text;
};

enum class Special { kThread, kBlock, kThreads, kBlocks, kLane, kLanesUpTo, kLanesFrom };

struct Parameter {
  int64_t offset, bytes;
};

struct Kernel {
  std::string name;
  std::vector<Instruction> code;
  std::vector<Parameter> parameters;
  int64_t parameter_bytes = 0, shared_bytes = 0, local_bytes = 0;
  int registers = 0;
  unsigned most_threads = 1024;  // of a block
  bool asks_for_shared = false;  // of a size that the launch says, behind shared_bytes
  std::map<uint64_t, int> constants;  // by value
  std::map<Special, int> specials;
};

// Ends the program: PTX that it does not know, or an error of a kernel.
[[noreturn]] void stop(const std::string& what);

// By name, as the runtime is told of them.
std::map<std::string, Kernel> read_program(const std::string& text);

// What an opcode does; stops at those that it does not know.
void look_up(const std::string& opcode, Instruction& instruction);

}  // namespace hkv::testing::ptx
