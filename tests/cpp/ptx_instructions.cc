// What instructions do. Floating-point numbers are rounded to nearest, subnormal ones are kept, and a NaN of
// 32 bits is the one that NVIDIA's devices make.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "ptx_machine.h"

namespace hkv::testing::ptx {
namespace {

template <class T>
T as(uint64_t word) {
  if constexpr (std::is_same_v<T, bool>) {
    return word != 0;
  } else {
    T value;
    std::memcpy(&value, &word, sizeof(T));
    return value;
  }
}

template <class T>
uint64_t word_of(T value) {
  if constexpr (std::is_same_v<T, float>) {
    if (std::isnan(value)) return 0x7fffffff;
  }
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  return word;
}

template <class Do>
void for_each(uint32_t lanes, const Do& act) {
  if (lanes == ~uint32_t{0}) {
    for (int lane = 0; lane < kWarpLanes; ++lane) act(lane);
  } else {
    for (; lanes != 0; lanes &= lanes - 1) act(std::countr_zero(lanes));
  }
}

template <class To, class From, class Function>
Effect unary(const Function&) {
  return [](Warp& warp, const Instruction& instruction, uint32_t lanes) {
    const uint64_t* a = warp.values(instruction.in[0]);
    uint64_t* result = warp.values(instruction.out[0]);
    for_each(lanes,
             [&](int lane) { result[lane] = word_of<To>(static_cast<To>(Function{}(as<From>(a[lane])))); });
  };
}

template <class To, class From, class Function>
Effect binary(const Function&) {
  return [](Warp& warp, const Instruction& instruction, uint32_t lanes) {
    const uint64_t* a = warp.values(instruction.in[0]);
    const uint64_t* b = warp.values(instruction.in[1]);
    uint64_t* result = warp.values(instruction.out[0]);
    for_each(lanes, [&](int lane) {
      result[lane] = word_of<To>(static_cast<To>(Function{}(as<From>(a[lane]), as<From>(b[lane]))));
    });
  };
}

template <class T, class Function>
Effect ternary(const Function&) {
  return [](Warp& warp, const Instruction& instruction, uint32_t lanes) {
    const uint64_t* a = warp.values(instruction.in[0]);
    const uint64_t* b = warp.values(instruction.in[1]);
    const uint64_t* c = warp.values(instruction.in[2]);
    uint64_t* result = warp.values(instruction.out[0]);
    for_each(lanes, [&](int lane) {
      result[lane] = word_of<T>(static_cast<T>(Function{}(as<T>(a[lane]), as<T>(b[lane]), as<T>(c[lane]))));
    });
  };
}

// A shift by a register's 32 bits: what is shifted by its width or more is gone.
template <class T, bool kIsLeft>
void shift(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  constexpr uint32_t kBits = 8 * sizeof(T);
  const uint64_t* a = warp.values(instruction.in[0]);
  const uint64_t* b = warp.values(instruction.in[1]);
  uint64_t* result = warp.values(instruction.out[0]);
  for_each(lanes, [&](int lane) {
    const T value = as<T>(a[lane]);
    const auto amount = static_cast<uint32_t>(b[lane]);
    const T none = !kIsLeft && value < 0 ? static_cast<T>(-1) : T{0};
    const T shifted = amount >= kBits ? none : static_cast<T>(kIsLeft ? value << amount : value >> amount);
    result[lane] = word_of<T>(shifted);
  });
}

template <class T>
T reversed(T word) {
  T result = 0;
  for (size_t bit = 0; bit < 8 * sizeof(T); ++bit) result = result << 1 | (word >> bit & 1);
  return result;
}

// b of the bits of `b` go to a at c.
template <class T>
void insert_bits(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  for_each(lanes, [&](int lane) {
    constexpr uint32_t kBits = 8 * sizeof(T);
    const T from = as<T>(warp.value(instruction.in[0], lane)),
            to = as<T>(warp.value(instruction.in[1], lane));
    const auto at = static_cast<uint8_t>(warp.value(instruction.in[2], lane));
    const auto count = static_cast<uint8_t>(warp.value(instruction.in[3], lane));
    const T field = count >= kBits ? ~T{0} : (T{1} << count) - 1;
    const T mask = at >= kBits ? T{0} : field << at;
    const T moved = at >= kBits ? T{0} : from << at;
    warp.values(instruction.out[0])[lane] = (to & ~mask) | (moved & mask);
  });
}

void select(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint64_t* a = warp.values(instruction.in[0]);
  const uint64_t* b = warp.values(instruction.in[1]);
  const uint64_t* predicate = warp.values(instruction.in[2]);
  uint64_t* result = warp.values(instruction.out[0]);
  const uint64_t kept = ~uint64_t{0} >> (64 - instruction.size * 8);
  for_each(lanes, [&](int lane) { result[lane] = (predicate[lane] != 0 ? a[lane] : b[lane]) & kept; });
}

// Also of one register to several, and of several to one.
void move(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const auto parts = static_cast<int>(std::max(instruction.out.size(), instruction.in.size()));
  const int bits = std::max(1, instruction.size * 8 / parts);
  const uint64_t kept = ~uint64_t{0} >> (64 - bits);
  for_each(lanes, [&](int lane) {
    if (instruction.in.size() == 1) {
      const uint64_t whole = warp.value(instruction.in[0], lane);
      for (size_t part = 0; part < instruction.out.size(); ++part) {
        if (instruction.out[part] == kNone) continue;
        warp.values(instruction.out[part])[lane] = whole >> (part * static_cast<size_t>(bits)) & kept;
      }
      return;
    }
    uint64_t whole = 0;
    for (size_t part = 0; part < instruction.in.size(); ++part) {
      whole |= (warp.value(instruction.in[part], lane) & kept) << (part * static_cast<size_t>(bits));
    }
    warp.values(instruction.out[0])[lane] = whole;
  });
}

// Bytes of two words, as the nibbles of a third say.
void permute_bytes(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  for_each(lanes, [&](int lane) {
    const auto low = as<uint32_t>(warp.value(instruction.in[0], lane));
    const uint64_t bytes = low | warp.value(instruction.in[1], lane) << 32;
    const uint64_t selector = warp.value(instruction.in[2], lane);
    uint64_t result = 0;
    for (int i = 0; i < 4; ++i) {
      const uint64_t nibble = selector >> (4 * i) & 15;
      const uint64_t byte = bytes >> (8 * (nibble & 7)) & 255;
      result |= (nibble < 8 ? byte : byte >> 7 ? 255 : 0) << (8 * i);
    }
    warp.values(instruction.out[0])[lane] = result;
  });
}

void load(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const int bits = 8 * instruction.size;
  warp.count_access(instruction, lanes, true, false);
  for_each(lanes, [&](int lane) {
    const char* address = warp.locate(instruction, lane);
    for (const int out : instruction.out) {
      uint64_t value = 0;
      std::memcpy(&value, address, static_cast<size_t>(instruction.size));
      if (instruction.is_signed) {
        value = static_cast<uint64_t>(static_cast<int64_t>(value << (64 - bits)) >> (64 - bits));
      }
      if (out != kNone) warp.values(out)[lane] = value;
      address += instruction.size;
    }
  });
}

void store(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  warp.count_access(instruction, lanes, false, true);
  for_each(lanes, [&](int lane) {
    char* address = warp.locate(instruction, lane);
    for (size_t i = 1; i < instruction.in.size(); ++i) {
      const uint64_t value = warp.value(instruction.in[i], lane);
      std::memcpy(address, &value, static_cast<size_t>(instruction.size));
      address += instruction.size;
    }
  });
}

template <class T, class Function>
Effect atomic(const Function&) {
  return [](Warp& warp, const Instruction& instruction, uint32_t lanes) {
    warp.count_access(instruction, lanes, true, true);
    for_each(lanes, [&](int lane) {
      char* address = warp.locate(instruction, lane);
      T old;
      std::memcpy(&old, address, sizeof(T));
      const auto operand = [&](size_t i) {
        return i < instruction.in.size() ? as<T>(warp.value(instruction.in[i], lane)) : T{};
      };
      const T value = static_cast<T>(Function{}(old, operand(1), operand(2)));
      std::memcpy(address, &value, sizeof(T));
      if (!instruction.out.empty() && instruction.out[0] != kNone) {
        warp.values(instruction.out[0])[lane] = word_of<T>(old);
      }
    });
  };
}

enum class Shuffle { kUp, kDown, kXor, kIndex };

template <Shuffle kMode>
void shuffle(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  std::array<uint64_t, kWarpLanes> old;
  std::copy_n(warp.values(instruction.in[0]), kWarpLanes, old.begin());
  for_each(lanes, [&](int lane) {
    const auto step = static_cast<int>(warp.value(instruction.in[1], lane) & 31);
    const auto limits = static_cast<int>(warp.value(instruction.in[2], lane));
    const int segment = limits >> 8 & 31, clamp = limits & 31;
    const int least = lane & segment, most = least | (clamp & ~segment);
    const int other = kMode == Shuffle::kUp     ? lane - step
                      : kMode == Shuffle::kDown ? lane + step
                      : kMode == Shuffle::kXor  ? lane ^ step
                                                : least | (step & ~segment);
    const bool is_within = kMode == Shuffle::kUp ? other >= most : other <= most;
    const int from = is_within ? other : lane;
    if ((lanes >> from & 1) == 0) warp.fault(instruction, lane, "a value of a thread that is not there");
    if (instruction.out[0] != kNone) warp.values(instruction.out[0])[lane] = old[static_cast<size_t>(from)];
    if (instruction.out.size() > 1) warp.values(instruction.out[1])[lane] = is_within;
  });
}

enum class Vote { kBallot, kAny, kAll };

template <Vote kMode>
void vote(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  uint32_t votes = 0;
  for_each(lanes, [&](int lane) { votes |= uint32_t{warp.value(instruction.in[0], lane) != 0} << lane; });
  const uint64_t result = kMode == Vote::kBallot ? votes : kMode == Vote::kAny ? votes != 0 : votes == lanes;
  for_each(lanes, [&](int lane) { warp.values(instruction.out[0])[lane] = result; });
}

using Effects = std::map<std::string, Effect>;

template <class T>
void add_arithmetic(Effects& effects, const std::string& name) {
  using Plain =
      std::conditional_t<std::is_floating_point_v<T>, std::type_identity<T>, std::make_unsigned<T>>::type;
  const std::string rounded = std::is_floating_point_v<T> ? "rn." + name : name;
  effects["add." + rounded] = binary<Plain, Plain>([](auto a, auto b) { return a + b; });
  effects["sub." + rounded] = binary<Plain, Plain>([](auto a, auto b) { return a - b; });
  effects["div." + rounded] =
      binary<T, T>([](auto a, auto b) { return b == 0 && !std::is_floating_point_v<T> ? T(-1) : T(a / b); });
  effects["neg." + name] = unary<Plain, Plain>([](auto a) { return -a; });
  effects["min." + name] = binary<T, T>([](auto a, auto b) { return b < a || a != a ? b : a; });
  effects["max." + name] = binary<T, T>([](auto a, auto b) { return a < b || a != a ? b : a; });
  if constexpr (std::is_floating_point_v<T>) {
    effects["mul." + rounded] = binary<T, T>([](auto a, auto b) { return a * b; });
    effects["rcp." + rounded] = unary<T, T>([](auto a) { return T{1} / a; });
    effects["sqrt." + rounded] = unary<T, T>([](auto a) { return std::sqrt(a); });
    effects["abs." + name] = unary<T, T>([](auto a) { return std::fabs(a); });
  } else {
    using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    effects["mul.lo." + name] = binary<Plain, Plain>([](auto a, auto b) { return Plain(uint64_t{a} * b); });
    effects["mul.hi." + name] =
        binary<T, T>([](auto a, auto b) { return T(Wide(a) * Wide(b) >> (8 * sizeof(T))); });
    effects["mad.lo." + name] =
        ternary<Plain>([](auto a, auto b, auto c) { return Plain(uint64_t{a} * b + c); });
    effects["rem." + name] = binary<T, T>([](auto a, auto b) { return b == 0 ? T(-1) : T(a % b); });
    effects["shr." + name] = shift<T, false>;
  }
}

template <class T>
void add_comparisons(Effects& effects, const std::string& name) {
  effects["setp.eq." + name] = binary<bool, T>([](auto a, auto b) { return a == b; });
  effects["setp.ne." + name] = binary<bool, T>([](auto a, auto b) { return a < b || b < a; });
  effects["setp.lt." + name] = binary<bool, T>([](auto a, auto b) { return a < b; });
  effects["setp.le." + name] = binary<bool, T>([](auto a, auto b) { return a <= b; });
  effects["setp.gt." + name] = binary<bool, T>([](auto a, auto b) { return a > b; });
  effects["setp.ge." + name] = binary<bool, T>([](auto a, auto b) { return a >= b; });
  if constexpr (std::is_floating_point_v<T>) {  // which hold where one is not a number
    effects["setp.num." + name] = binary<bool, T>([](auto a, auto b) { return a == a && b == b; });
    effects["setp.nan." + name] = binary<bool, T>([](auto a, auto b) { return a != a || b != b; });
    effects["setp.equ." + name] = binary<bool, T>([](auto a, auto b) { return !(a < b || b < a); });
    effects["setp.neu." + name] = binary<bool, T>([](auto a, auto b) { return !(a == b); });
    effects["setp.ltu." + name] = binary<bool, T>([](auto a, auto b) { return !(a >= b); });
    effects["setp.leu." + name] = binary<bool, T>([](auto a, auto b) { return !(a > b); });
    effects["setp.gtu." + name] = binary<bool, T>([](auto a, auto b) { return !(a <= b); });
    effects["setp.geu." + name] = binary<bool, T>([](auto a, auto b) { return !(a < b); });
  }
}

template <class T>
void add_logic(Effects& effects, const std::string& name) {
  effects["and." + name] = binary<T, T>([](auto a, auto b) { return a & b; });
  effects["or." + name] = binary<T, T>([](auto a, auto b) { return a | b; });
  effects["xor." + name] = binary<T, T>([](auto a, auto b) { return a ^ b; });
  if constexpr (std::is_same_v<T, bool>) {
    effects["not." + name] = unary<bool, bool>([](auto a) { return !a; });
  } else {
    effects["not." + name] = unary<T, T>([](auto a) { return ~a; });
    effects["shl." + name] = shift<T, true>;
    effects["shr." + name] = shift<T, false>;
  }
}

template <class From>
void add_conversions(Effects& effects, const std::string& from) {
  const auto add = [&]<class To>(To, const std::string& to) {
    const bool is_rounded =
        std::is_floating_point_v<To> && (!std::is_floating_point_v<From> || sizeof(To) < sizeof(From));
    if constexpr (std::is_floating_point_v<To> || !std::is_floating_point_v<From>) {
      effects["cvt." + std::string(is_rounded ? "rn." : "") + to + "." + from] =
          unary<To, From>([](auto a) { return static_cast<To>(a); });
    }
  };
  add(uint8_t{}, "u8"), add(uint16_t{}, "u16"), add(uint32_t{}, "u32"), add(uint64_t{}, "u64");
  add(int8_t{}, "s8"), add(int16_t{}, "s16"), add(int32_t{}, "s32"), add(int64_t{}, "s64");
  add(float{}, "f32"), add(double{}, "f64");
}

template <class From, class To>
void add_wide(Effects& effects, const std::string& from) {
  effects["mul.wide." + from] = binary<To, From>([](auto a, auto b) { return To(To(a) * To(b)); });
}

template <class T>
void add_atomics(Effects& effects, const std::string& bits) {
  for (const char* kind : {"u", "b"}) {
    effects["add." + (kind + bits)] = atomic<T>([](auto old, auto a, auto) { return old + a; });
    effects["or." + (kind + bits)] = atomic<T>([](auto old, auto a, auto) { return old | a; });
    effects["max." + (kind + bits)] = atomic<T>([](auto old, auto a, auto) { return old < a ? a : old; });
    effects["cas." + (kind + bits)] = atomic<T>([](auto old, auto a, auto b) { return old == a ? b : old; });
    effects["exch." + (kind + bits)] = atomic<T>([](auto, auto a, auto) { return a; });
  }
}

Effects make_effects() {
  Effects effects;
  add_arithmetic<uint16_t>(effects, "u16"), add_arithmetic<int16_t>(effects, "s16");
  add_arithmetic<uint32_t>(effects, "u32"), add_arithmetic<int32_t>(effects, "s32");
  add_arithmetic<uint64_t>(effects, "u64"), add_arithmetic<int64_t>(effects, "s64");
  add_arithmetic<float>(effects, "f32"), add_arithmetic<double>(effects, "f64");
  add_comparisons<uint16_t>(effects, "u16"), add_comparisons<int16_t>(effects, "s16");
  add_comparisons<uint32_t>(effects, "u32"), add_comparisons<int32_t>(effects, "s32");
  add_comparisons<uint64_t>(effects, "u64"), add_comparisons<int64_t>(effects, "s64");
  add_comparisons<uint16_t>(effects, "b16"), add_comparisons<uint32_t>(effects, "b32");
  add_comparisons<uint64_t>(effects, "b64");
  add_comparisons<float>(effects, "f32"), add_comparisons<double>(effects, "f64");
  add_logic<bool>(effects, "pred"), add_logic<uint16_t>(effects, "b16");
  add_logic<uint32_t>(effects, "b32"), add_logic<uint64_t>(effects, "b64");
  add_conversions<uint8_t>(effects, "u8"), add_conversions<int8_t>(effects, "s8");
  add_conversions<uint16_t>(effects, "u16"), add_conversions<int16_t>(effects, "s16");
  add_conversions<uint32_t>(effects, "u32"), add_conversions<int32_t>(effects, "s32");
  add_conversions<uint64_t>(effects, "u64"), add_conversions<int64_t>(effects, "s64");
  add_conversions<float>(effects, "f32"), add_conversions<double>(effects, "f64");
  add_wide<uint16_t, uint32_t>(effects, "u16"), add_wide<int16_t, int32_t>(effects, "s16");
  add_wide<uint32_t, uint64_t>(effects, "u32"), add_wide<int32_t, int64_t>(effects, "s32");
  effects["bfi.b32"] = insert_bits<uint32_t>;
  effects["bfi.b64"] = insert_bits<uint64_t>;
  effects["prmt.b32"] = permute_bytes;
  effects["clz.b32"] = unary<uint32_t, uint32_t>([](auto a) { return std::countl_zero(a); });
  effects["clz.b64"] = unary<uint32_t, uint64_t>([](auto a) { return std::countl_zero(a); });
  effects["popc.b32"] = unary<uint32_t, uint32_t>([](auto a) { return std::popcount(a); });
  effects["popc.b64"] = unary<uint32_t, uint64_t>([](auto a) { return std::popcount(a); });
  effects["shf.l.wrap.b32"] = ternary<uint32_t>([](auto low, auto high, auto by) {
    return static_cast<uint32_t>(((uint64_t{high} << 32 | low) << (by & 31)) >> 32);
  });
  effects["brev.b32"] = unary<uint32_t, uint32_t>([](auto a) { return reversed(a); });
  effects["brev.b64"] = unary<uint64_t, uint64_t>([](auto a) { return reversed(a); });
  effects["bmsk.clamp.b32"] = binary<uint32_t, uint32_t>([](uint32_t a, uint32_t b) {
    const uint64_t field = b >= 32 ? 0xffffffff : (uint64_t{1} << b) - 1;
    return a >= 32 ? 0 : static_cast<uint32_t>(field << a);
  });
  effects["shfl.sync.up.b32"] = shuffle<Shuffle::kUp>;
  effects["shfl.sync.down.b32"] = shuffle<Shuffle::kDown>;
  effects["shfl.sync.bfly.b32"] = shuffle<Shuffle::kXor>;
  effects["shfl.sync.idx.b32"] = shuffle<Shuffle::kIndex>;
  for (const char* name : {"vote.sync.ballot.b32", "vote.ballot.sync.b32"})
    effects[name] = vote<Vote::kBallot>;
  effects["vote.sync.any.pred"] = vote<Vote::kAny>;
  effects["vote.sync.all.pred"] = vote<Vote::kAll>;
  return effects;
}

Effects make_atomics() {
  Effects effects;
  add_atomics<uint32_t>(effects, "32");
  add_atomics<uint64_t>(effects, "64");
  effects["min.s32"] = atomic<int32_t>([](auto old, auto a, auto) { return std::min(old, a); });
  effects["max.s32"] = atomic<int32_t>([](auto old, auto a, auto) { return std::max(old, a); });
  return effects;
}

void set_type(const std::string& type, Instruction& instruction) {
  instruction.size = type == "pred" ? 0 : std::atoi(type.c_str() + 1) / 8;
  instruction.is_signed = type[0] == 's';
}

// ld.relaxed.gpu.global.v2.u32 and its like: what caches should do is not looked at.
void set_access(const std::vector<std::string>& words, Instruction& instruction) {
  static const std::map<std::string, Space> kSpaces = {{"global", Space::kGlobal},
                                                       {"shared", Space::kShared},
                                                       {"local", Space::kLocal},
                                                       {"param", Space::kParameter}};
  for (const std::string& word : words) {
    if (const auto space = kSpaces.find(word); space != kSpaces.end()) instruction.space = space->second;
    if (word[0] == 'v' && word != "volatile") instruction.count = std::stoi(word.substr(1));
  }
  set_type(words.back(), instruction);
}

}  // namespace

void look_up(const std::string& opcode, Instruction& instruction) {
  static const Effects kEffects = make_effects(), kAtomics = make_atomics();
  static const std::map<std::string, Kind> kKinds = {
      {"bra", Kind::kBranch},    {"ret", Kind::kExit},      {"exit", Kind::kExit},
      {"shfl", Kind::kExchange}, {"vote", Kind::kExchange}, {"nanosleep", Kind::kPause},
      {"membar", Kind::kPause},  {"fence", Kind::kPause},
  };
  std::vector<std::string> words(1);
  for (const char c : opcode) {
    if (c == '.') {
      words.emplace_back();
    } else {
      words.back() += c;
    }
  }
  if (const auto kind = kKinds.find(words[0]); kind != kKinds.end()) instruction.kind = kind->second;
  if (opcode == "bar.warp.sync") instruction.kind = Kind::kWarpBarrier;
  if (opcode == "bar.sync" || opcode == "bar.red.or.pred") instruction.kind = Kind::kBlockBarrier;
  if (words[0] == "ld" || words[0] == "st") {
    set_access(words, instruction);
    instruction.effect = words[0] == "ld" ? load : store;
  } else if (words[0] == "mov" || words[0] == "cvta") {
    set_type(words.back(), instruction);
    instruction.effect = move;
  } else if (words[0] == "selp") {
    set_type(words.back(), instruction);
    instruction.effect = select;
  } else if (words[0] == "atom" || words[0] == "red") {
    set_access(words, instruction);
    const auto atomic = kAtomics.find(words[words.size() - 2] + "." + words.back());
    if (atomic != kAtomics.end()) instruction.effect = atomic->second;
  } else if (const auto effect = kEffects.find(opcode); effect != kEffects.end()) {
    instruction.effect = effect->second;
  }
  const bool needs_effect = instruction.kind == Kind::kPlain || instruction.kind == Kind::kExchange;
  if (needs_effect && instruction.effect == nullptr) stop("no instruction that is known here: " + opcode);
}

}  // namespace hkv::testing::ptx
