#include "ptx_machine.h"

#include <malloc.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <utility>

namespace hkv::testing::ptx {
namespace {

// In memory of a block or a thread and in registers, before they are written.
constexpr char kGarbage = 'g';
constexpr uint64_t kGarbageWord = 0x6767676767676767;

}  // namespace

// The registers of a warp come and go with it: what the C library gives back must be fetched again.
Memory::Memory() {
  constexpr int kNever = 1 << 30;
  mallopt(M_MMAP_THRESHOLD, kNever);
  mallopt(M_TRIM_THRESHOLD, kNever);
}

void* Memory::allocate(size_t bytes) {
  constexpr size_t kAlignment = 256;  // as cudaMalloc's
  constexpr size_t kApart = 4096;  // bytes at least between arrays: who overruns one meets no other
  const size_t words = (bytes + kApart) / kAlignment * (kAlignment / sizeof(uint64_t));
  auto* const array = static_cast<uint64_t*>(std::aligned_alloc(kAlignment, words * sizeof(uint64_t)));
  if (array == nullptr) stop("no memory for " + std::to_string(bytes) + " bytes");
  std::generate_n(array, words, [this] { return garbage_.word(); });
  arrays_[reinterpret_cast<uintptr_t>(array)] = {bytes, {}, {}};
  return array;
}

void Memory::free(void* address) {
  if (arrays_.erase(reinterpret_cast<uintptr_t>(address)) == 0) stop("an array is freed that is none");
  last_begin_ = last_end_ = 0;
  std::free(address);
}

bool Memory::has(uintptr_t address, size_t bytes) const {
  if (address < last_begin_ || address >= last_end_) {
    auto array = arrays_.upper_bound(address);
    if (array == arrays_.begin()) return false;
    --array;
    last_begin_ = array->first;
    last_end_ = array->first + array->second.bytes;
  }
  return address < last_end_ && bytes <= last_end_ - address;
}

void Memory::begin_launch(const std::string& kernel) {
  if (!counts) return;
  ++launch_;
  launched_ = &traffic[kernel];
  ++launched_->launches;
}

void Memory::count_sectors(std::vector<uintptr_t> sectors, bool reads, bool writes) {
  std::sort(sectors.begin(), sectors.end());
  sectors.erase(std::unique(sectors.begin(), sectors.end()), sectors.end());
  launched_->requested += static_cast<int64_t>(sectors.size());
  for (const uintptr_t sector : sectors) {
    const auto found = std::prev(arrays_.upper_bound(sector * kSector));
    const size_t place = (sector * kSector - found->first) / kSector;
    const auto mark = [&](std::vector<uint32_t>& marks, int64_t& count) {
      marks.resize(std::max(marks.size(), found->second.bytes / kSector + 1));
      if (std::exchange(marks[place], launch_) != launch_) ++count;
    };
    if (reads) mark(found->second.read, launched_->read);
    if (writes) mark(found->second.written, launched_->written);
  }
}

Warp::Warp(Block& block, int first_thread)
    : block_(block),
      code_(block.kernel->code),
      first_thread_(first_thread),
      registers_(static_cast<size_t>(block.kernel->registers) * kWarpLanes, kGarbageWord),
      local_(static_cast<size_t>(block.kernel->local_bytes) * kWarpLanes, kGarbage) {
  for (const auto& [value, number] : block.kernel->constants) {
    std::fill_n(values(number), kWarpLanes, value);
  }
  for (const auto& [special, number] : block.kernel->specials) {
    for (uint32_t lane = 0; lane < kWarpLanes; ++lane) {
      const auto value = [&]() -> uint64_t {
        switch (special) {
          case Special::kThread: return static_cast<uint64_t>(first_thread) + lane;
          case Special::kBlock: return block.index;
          case Special::kThreads: return block.threads;
          case Special::kBlocks: return block.blocks;
          case Special::kLane: return lane;
          case Special::kLanesUpTo: return ~uint32_t{0} >> (kWarpLanes - 1 - lane);
          case Special::kLanesFrom: return ~uint32_t{0} << lane;
        }
        return 0;
      };
      values(number)[lane] = static_cast<uint32_t>(value());
    }
  }
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    const bool is_there = static_cast<unsigned>(first_thread + lane) < block.threads;
    state_[lane] = is_there ? State::kReady : State::kExited;
  }
}

void Warp::fault(const Instruction& instruction, int lane, const std::string& what) const {
  stop(block_.kernel->name + thread_at(instruction, lane, what));
}

std::string Warp::thread_at(const Instruction& instruction, int lane, const std::string& what) const {
  return "\n  block " + std::to_string(block_.index) + " thread " + std::to_string(first_thread_ + lane) +
         " at line " + std::to_string(instruction.line) + ": " + instruction.text + ": " + what;
}

char* Warp::locate(const Instruction& instruction, int lane) {
  const auto bytes = static_cast<size_t>(instruction.size * instruction.count);
  const uint64_t address = value(instruction.in[0], lane) + static_cast<uint64_t>(instruction.offset);
  const auto within = [&](const char* base, size_t size) {
    if (address > size || bytes > size - address) fault(instruction, lane, "an access outside of its space");
    return const_cast<char*>(base) + address;
  };
  if (address % bytes != 0) fault(instruction, lane, "a misaligned address: " + std::to_string(address));
  switch (instruction.space) {
    case Space::kParameter: return within(block_.parameters->data(), block_.parameters->size());
    case Space::kShared: return within(block_.shared.data(), block_.shared.size());
    case Space::kLocal: {
      const size_t size = local_.size() / kWarpLanes;
      return within(local_.data() + size * static_cast<size_t>(lane), size);
    }
    case Space::kGlobal: break;
  }
  if (!block_.memory->has(address, bytes)) fault(instruction, lane, "an access outside of all arrays");
  return reinterpret_cast<char*>(address);
}

void Warp::count_access(const Instruction& instruction, uint32_t lanes, bool reads, bool writes) {
  if (!block_.memory->counts || instruction.space != Space::kGlobal) return;
  std::vector<uintptr_t> sectors;
  for (; lanes != 0; lanes &= lanes - 1) {
    const char* address = locate(instruction, std::countr_zero(lanes));
    sectors.push_back(reinterpret_cast<uintptr_t>(address) / kSector);
  }
  block_.memory->count_sectors(std::move(sectors), reads, writes);
}

std::string Warp::whereabouts() const {
  std::string text;
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    if (state_[lane] == State::kExited) continue;
    const bool is_ready = state_[lane] == State::kReady;
    text += thread_at(code_[static_cast<size_t>(place_[lane])], lane, is_ready ? "can go on" : "waits");
  }
  return text;
}

uint32_t Warp::choose(Choice choice, Random& random) const {
  const uint32_t ready = lanes_in(State::kReady);
  int place = kNone;
  for (uint32_t rest = ready; rest != 0; rest &= rest - 1) {
    const int own = place_[std::countr_zero(rest)];
    const bool is_better = choice == Choice::kLeast      ? own < place
                           : choice == Choice::kGreatest ? own > place
                                                         : random.chance(0.5);
    if (place == kNone || is_better) place = own;
  }
  uint32_t lanes = 0;
  for (uint32_t rest = ready; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    lanes |= uint32_t{place_[lane] == place} << lane;
  }
  return lanes;
}

uint32_t Warp::guarded(const Instruction& instruction, uint32_t lanes) {
  if (instruction.guard == kNone) return lanes;
  const uint64_t* guard = values(instruction.guard);
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    if ((guard[lane] != 0) == instruction.guard_is_negated) lanes &= ~(uint32_t{1} << lane);
  }
  return lanes;
}

void Warp::run(int instructions, Random& random) {
  Memory& memory = *block_.memory;
  const uint64_t chance = random.word() % 8;
  const Choice choice = memory.counts || chance > 1 ? Choice::kLeast
                        : chance == 1               ? Choice::kGreatest
                                                    : Choice::kAny;
  while (instructions > 0) {
    const uint32_t lanes = choose(choice, random);
    if (lanes == 0) return;
    int place = place_[std::countr_zero(lanes)];
    // Until the lanes part, may meet others or wait.
    const Instruction* instruction = nullptr;
    uint32_t active = 0;
    do {
      instruction = &code_[static_cast<size_t>(place++)];
      active = guarded(*instruction, lanes);
      if (memory.counts) memory.count_instruction();
      if (instruction->kind == Kind::kPlain && active != 0) instruction->effect(*this, *instruction, active);
      --instructions;
    } while (instruction->kind == Kind::kPlain && instructions > 0 &&
             !code_[static_cast<size_t>(place)].is_target);
    leave(lanes, place, State::kReady);
    if (active != 0) turn(*instruction, active, place - 1);
    if (instruction->kind == Kind::kPause) return;
  }
}

// What changes the course of lanes at a place.
void Warp::turn(const Instruction& instruction, uint32_t lanes, int place) {
  switch (instruction.kind) {
    case Kind::kPlain:
    case Kind::kPause: break;
    case Kind::kBranch: leave(lanes, instruction.target, State::kReady); break;
    case Kind::kBlockBarrier: leave(lanes, place, State::kAtBlockBarrier); break;
    case Kind::kExit:
      leave(lanes, place, State::kExited);
      let_meet();
      break;
    case Kind::kExchange:
    case Kind::kWarpBarrier: arrive(instruction, lanes, place);
  }
}

void Warp::arrive(const Instruction& instruction, uint32_t lanes, int place) {
  leave(lanes, place, State::kWaiting);
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    waits_for_[lane] = static_cast<uint32_t>(value(instruction.in.back(), lane));
    if ((waits_for_[lane] >> lane & 1) == 0) fault(instruction, lane, "a mask that its own thread is not in");
  }
  let_meet();
}

// Lanes that all of their mask's have joined go on.
void Warp::let_meet() {
  const uint32_t waiting = lanes_in(State::kWaiting), exited = lanes_in(State::kExited);
  for (uint32_t rest = waiting; rest != 0;) {
    const int lane = std::countr_zero(rest);
    const Instruction& instruction = code_[static_cast<size_t>(place_[lane])];
    const uint32_t mask = waits_for_[lane], lanes = mask & ~exited;
    bool is_complete = (lanes & ~rest) == 0;
    for (int other = 0; other < kWarpLanes && is_complete; ++other) {
      if ((lanes >> other & 1) == 0) continue;
      const bool is_here = instruction.kind == Kind::kExchange
                               ? place_[other] == place_[lane]
                               : code_[static_cast<size_t>(place_[other])].kind == instruction.kind;
      is_complete = is_here && waits_for_[other] == mask;
    }
    if (!is_complete) {
      rest &= ~(uint32_t{1} << lane);
      continue;
    }
    rest &= ~lanes;
    if (instruction.kind == Kind::kExchange) instruction.effect(*this, instruction, lanes);
    pass(lanes);
  }
}

void Warp::pass(uint32_t lanes) {
  for (; lanes != 0; lanes &= lanes - 1) {
    ++place_[std::countr_zero(lanes)];
    state_[std::countr_zero(lanes)] = State::kReady;
  }
}

namespace {

struct Resident {
  Block block;
  std::vector<Warp> warps;
};

std::unique_ptr<Resident> start_block(const Block& form, unsigned index, size_t shared) {
  auto resident = std::make_unique<Resident>(Resident{form, {}});
  resident->block.index = index;
  resident->block.shared.resize(static_cast<size_t>(form.kernel->shared_bytes) + shared, kGarbage);
  for (unsigned thread = 0; thread < form.threads; thread += kWarpLanes) {
    resident->warps.emplace_back(resident->block, static_cast<int>(thread));
  }
  return resident;
}

// Lets all pass if nobody is missing; of a reduction they get the disjunction.
void open_barrier(std::vector<Warp>& warps) {
  bool is_any = false, is_waiting = false;
  for (Warp& warp : warps) {
    const uint32_t lanes = warp.at_block_barrier();
    if (lanes != warp.not_exited()) return;
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
      const int lane = std::countr_zero(rest);
      const Instruction& instruction = warp.place_of(lane);
      is_waiting = true;
      is_any = is_any || (!instruction.out.empty() && warp.value(instruction.in.back(), lane) != 0);
    }
  }
  if (!is_waiting) return;
  for (Warp& warp : warps) {
    for (uint32_t rest = warp.at_block_barrier(); rest != 0; rest &= rest - 1) {
      const int lane = std::countr_zero(rest);
      const Instruction& instruction = warp.place_of(lane);
      if (!instruction.out.empty()) warp.values(instruction.out[0])[lane] = is_any;
    }
    warp.pass_block_barrier();
  }
}

}  // namespace

void run_grid(const Kernel& kernel, unsigned blocks, unsigned threads, size_t shared,
              const std::vector<char>& parameters, Memory& memory, Random& random) {
  constexpr int64_t kTurn = 400, kLongTurn = 1 << 20;  // instructions at most
  constexpr size_t kResidents = 3;       // blocks at a time, begun in order
  // Of a grid, and of each of its warps: then somebody waits for ever.
  constexpr int64_t kMostTurns = 1 << 18, kMostTurnsOfWarp = 1 << 12;
  const int64_t most_turns = kMostTurns + kMostTurnsOfWarp * (int64_t{blocks} * threads / kWarpLanes);
  memory.begin_launch(kernel.name);
  const Block form{&kernel, &memory, &parameters, {}, 0, blocks, threads};
  std::vector<std::unique_ptr<Resident>> residents;
  unsigned begun = 0;
  for (int64_t turn = 0; turn < most_turns; ++turn) {
    while (residents.size() < kResidents && begun < blocks) {
      residents.push_back(start_block(form, begun++, shared));
    }
    if (residents.empty()) return;
    std::vector<Warp*> able;
    for (const auto& resident : residents) {
      for (Warp& warp : resident->warps) {
        if (warp.can_go_on()) able.push_back(&warp);
      }
    }
    if (able.empty()) break;
    able[static_cast<size_t>(random.below(static_cast<int64_t>(able.size())))]->run(
        static_cast<int>(1 + random.below(memory.counts ? kLongTurn : kTurn)), random);
    for (const auto& resident : residents) open_barrier(resident->warps);
    std::erase_if(residents, [](const auto& resident) {
      return std::all_of(resident->warps.begin(), resident->warps.end(),
                         [](const Warp& warp) { return warp.has_ended(); });
    });
  }
  std::string where;
  for (const auto& resident : residents) {
    for (const Warp& warp : resident->warps) where += warp.whereabouts();
  }
  stop(kernel.name + ": threads wait for others that never come" + where);
}

}  // namespace hkv::testing::ptx
