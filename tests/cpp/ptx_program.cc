#include "ptx_program.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <sstream>

namespace hkv::testing::ptx {
namespace {

constexpr int64_t kAlignment = 16;  // of every array

std::string trimmed(const std::string& text) {
  const char* kBlank = " \t\n\r";
  const size_t begin = text.find_first_not_of(kBlank);
  if (begin == std::string::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlank) - begin + 1);
}

// At commas that stand in no brackets.
std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::string part;
  int depth = 0;
  for (const char c : text) {
    depth += c == '{' || c == '[' ? 1 : c == '}' || c == ']' ? -1 : 0;
    if (c == ',' && depth == 0) {
      parts.push_back(trimmed(part));
      part.clear();
    } else {
      part += c;
    }
  }
  if (!trimmed(part).empty()) parts.push_back(trimmed(part));
  return parts;
}

int bits_of(const std::string& type) {
  const int bits = std::atoi(type.c_str() + 1);
  if (bits < 8 || bits > 64) stop("no type of PTX that is known here: " + type);
  return bits;
}

// The declaration of an array or a parameter: its name, its bytes.
struct Declared {
  std::string name;
  int64_t bytes;
};

Declared declared(const std::string& text) {
  std::istringstream words(text);
  std::string word, type, name;
  while (words >> word) {
    if (word == ".align") {
      words >> word;
    } else if (word[0] == '.') {
      type = word.substr(1);
    } else {
      name = word;
    }
  }
  const int64_t element = bits_of(type) / 8;
  const size_t bracket = name.find('[');
  if (bracket == std::string::npos) return {name, element};
  return {name.substr(0, bracket), element * std::atoll(name.c_str() + bracket + 1)};
}

class Reader {
 public:
  Reader(const std::string& text, size_t position, int line, const std::set<std::string>& unsized)
      : text_(text), position_(position), line_(line), unsized_(unsized) {}

  // From behind ".entry".
  Kernel read() {
    kernel_.name = word_until("(");
    for (const std::string& parameter : split(word_until(")"))) declare_parameter(parameter);
    const std::string directives = word_until("{"), most = ".maxntid";
    const size_t found = directives.find(most);
    if (found != std::string::npos) {
      kernel_.most_threads = static_cast<unsigned>(std::atoi(directives.c_str() + found + most.size()));
    }
    scopes_.emplace_back();
    while (!scopes_.empty()) read_statement();
    for (const auto& [at, label] : branches_) {
      const auto target = labels_.find(label);
      if (target == labels_.end()) stop(kernel_.name + ": no label " + label);
      kernel_.code[at].target = target->second;
    }
    for (const auto& [label, at] : labels_) {
      if (at < static_cast<int>(kernel_.code.size())) kernel_.code[at].is_target = true;
    }
    return std::move(kernel_);
  }

 private:
  char next() {
    const char c = text_.at(position_++);
    line_ += c == '\n';
    return c;
  }
  std::string word_until(const char* ends) {
    std::string word;
    for (char c = next(); std::strchr(ends, c) == nullptr; c = next()) word += c;
    return trimmed(word);
  }
  static int64_t place(int64_t& bytes, int64_t more) {
    const int64_t offset = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    bytes = offset + more;
    return offset;
  }
  void declare_parameter(const std::string& text) {
    const Declared array = declared(text.substr(std::strlen(".param")));
    const int64_t offset = place(kernel_.parameter_bytes, array.bytes);
    kernel_.parameters.push_back({offset, array.bytes});
    symbols_[array.name] = offset;
  }

  void read_statement() {
    while (std::isspace(static_cast<unsigned char>(text_.at(position_)))) next();
    if (text_[position_] == '{') {
      next();
      scopes_.emplace_back();
      return;
    }
    if (text_[position_] == '}') {
      next();
      scopes_.pop_back();
      return;
    }
    const int line = line_;
    std::string statement;
    for (char c = next(); c != ';'; c = next()) {
      if (c == ':' && statement.find_first_of(" \t,") == std::string::npos) {
        labels_[statement] = static_cast<int>(kernel_.code.size());
        return;
      }
      statement += c == '\n' || c == '\t' ? ' ' : c;
    }
    statement = trimmed(statement);
    if (statement.empty() || statement.starts_with(".pragma")) return;
    if (statement[0] == '.') {
      declare(statement);
    } else {
      read_instruction(statement, line);
    }
  }

  void declare(const std::string& statement) {
    const size_t blank = statement.find(' ');
    const std::string what = statement.substr(0, blank), rest = trimmed(statement.substr(blank));
    if (what == ".reg") return declare_registers(rest);
    if (what != ".shared" && what != ".local") stop(kernel_.name + ": unknown directive " + statement);
    if (kernel_.asks_for_shared) stop(kernel_.name + ": an array behind those without a size: " + rest);
    const Declared array = declared(rest);
    symbols_[array.name] = place(what == ".shared" ? kernel_.shared_bytes : kernel_.local_bytes, array.bytes);
  }
  void declare_registers(const std::string& text) {
    const size_t blank = text.find(' ');
    for (const std::string& name : split(text.substr(blank))) {
      const size_t bracket = name.find('<');
      if (bracket == std::string::npos) {
        scopes_.back()[name] = kernel_.registers++;
        continue;
      }
      for (int i = 0; i < std::atoi(name.c_str() + bracket + 1); ++i) {
        scopes_.back()[name.substr(0, bracket) + std::to_string(i)] = kernel_.registers++;
      }
    }
  }

  int constant(uint64_t value) {
    const auto [found, is_new] = kernel_.constants.try_emplace(value, kernel_.registers);
    kernel_.registers += is_new;
    return found->second;
  }
  int operand(const std::string& text) {
    if (text == "_") return kNone;
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (const auto found = scope->find(text); found != scope->end()) return found->second;
    }
    static const std::map<std::string, Special> kSpecials = {
        {"%tid.x", Special::kThread},          {"%ctaid.x", Special::kBlock},
        {"%ntid.x", Special::kThreads},        {"%nctaid.x", Special::kBlocks},
        {"%laneid", Special::kLane},           {"%lanemask_le", Special::kLanesUpTo},
        {"%lanemask_ge", Special::kLanesFrom},
    };
    if (const auto special = kSpecials.find(text); special != kSpecials.end()) {
      const auto [found, is_new] = kernel_.specials.try_emplace(special->second, kernel_.registers);
      kernel_.registers += is_new;
      return found->second;
    }
    if (const auto symbol = symbols_.find(text); symbol != symbols_.end()) {
      return constant(static_cast<uint64_t>(symbol->second));
    }
    if (unsized_.contains(text)) {
      kernel_.asks_for_shared = true;
      place(kernel_.shared_bytes, 0);
      return constant(static_cast<uint64_t>(kernel_.shared_bytes));
    }
    if (text.starts_with("0f") || text.starts_with("0d")) {
      return constant(std::strtoull(text.c_str() + 2, nullptr, 16));
    }
    char* end = nullptr;
    const bool is_negative = text[0] == '-';
    const uint64_t number = std::strtoull(text.c_str() + (is_negative ? 1 : 0), &end, 0);
    if (*end != 0 && *end != 'U') stop(kernel_.name + ": unknown operand " + text);
    return constant(is_negative ? 0 - number : number);
  }
  // Of {a, b}, of a|p and of a.
  std::vector<int> operands(const std::string& text) {
    std::vector<int> all;
    std::string list = text[0] == '{' ? text.substr(1, text.find('}') - 1) : text;
    std::replace(list.begin(), list.end(), '|', ',');
    for (const std::string& one : split(list)) all.push_back(operand(one));
    return all;
  }

  void read_instruction(const std::string& statement, int line) {
    Instruction instruction;
    instruction.line = line;
    instruction.text = statement;
    const std::string rest = without_guard(statement, instruction);
    const size_t end = std::min(rest.find_first_of(" {["), rest.size());
    const std::string opcode = rest.substr(0, end);
    const std::vector<std::string> arguments = split(rest.substr(end));
    look_up(opcode, instruction);
    if (instruction.kind == Kind::kBranch) {
      branches_.emplace_back(kernel_.code.size(), arguments.at(0));
    } else {
      const bool has_result = instruction.kind != Kind::kWarpBarrier && instruction.kind != Kind::kPause &&
                              !opcode.starts_with("st.") && !opcode.starts_with("red.") &&
                              !opcode.starts_with("bar.sync");
      for (size_t i = 0; i < arguments.size(); ++i)
        read_argument(arguments[i], i == 0 && has_result, instruction);
    }
    const bool is_of_all = opcode == "bar.sync" ? arguments == std::vector<std::string>{"0"}
                                                : arguments.size() == 3 && arguments[1] == "0";
    const bool may_have_several = instruction.effect == nullptr || instruction.kind == Kind::kExchange ||
                                  opcode.starts_with("ld.") || opcode.starts_with("mov.");
    if ((instruction.kind == Kind::kBlockBarrier && !is_of_all) ||
        (instruction.out.size() > 1 && !may_have_several)) {
      stop("no form of the instruction that is known here: " + statement);
    }
    kernel_.code.push_back(std::move(instruction));
  }
  // "@%p1 add" or "@!%p1 add": only where the predicate holds, or does not.
  std::string without_guard(const std::string& statement, Instruction& instruction) {
    if (statement[0] != '@') return statement;
    instruction.guard_is_negated = statement[1] == '!';
    const size_t begin = instruction.guard_is_negated ? 2 : 1, end = statement.find(' ');
    instruction.guard = operand(statement.substr(begin, end - begin));
    return trimmed(statement.substr(end));
  }
  void read_argument(const std::string& text, bool is_result, Instruction& instruction) {
    if (text[0] == '[') {  // where in memory: the first one, wherever it stands
      const std::string address = text.substr(1, text.find(']') - 1);
      const size_t plus = address.find('+');
      if (plus != std::string::npos) instruction.offset = std::atoll(address.c_str() + plus + 1);
      instruction.in.insert(instruction.in.begin(), operand(trimmed(address.substr(0, plus))));
    } else if (is_result) {
      instruction.out = operands(text);
    } else {
      const std::vector<int> own = operands(text);
      instruction.in.insert(instruction.in.end(), own.begin(), own.end());
    }
  }

  const std::string& text_;
  size_t position_;
  int line_;
  const std::set<std::string>& unsized_;
  Kernel kernel_;
  std::map<std::string, int64_t> symbols_;
  std::map<std::string, int> labels_;
  std::vector<std::pair<size_t, std::string>> branches_;
  std::vector<std::map<std::string, int>> scopes_;  // registers by name
};

// Most of nvcc's registers are written once and read soon. Those that a stretch without labels and branches
// writes before it reads them, and that stand nowhere else, take turns: far fewer are made for each warp.
void share_registers(Kernel& kernel) {
  struct Use {
    int stretch = kNone, number = kNone;
    bool is_shared = false;
    size_t last = 0;
  };
  std::vector<Use> uses(static_cast<size_t>(kernel.registers));
  const auto use_of = [&](int number) -> Use& { return uses[static_cast<size_t>(number)]; };
  int stretch = 0;
  for (size_t at = 0; at < kernel.code.size(); ++at) {
    const Instruction& instruction = kernel.code[at];
    stretch += instruction.is_target;
    const auto see = [&](int number, bool is_written) {
      if (number == kNone) return;
      Use& use = use_of(number);
      use.is_shared = use.stretch == kNone ? is_written : use.is_shared && use.stretch == stretch;
      use.stretch = stretch;
      use.last = at;
    };
    see(instruction.guard, false);
    for (const int number : instruction.in) see(number, false);
    for (const int number : instruction.out) see(number, instruction.guard == kNone);
    stretch += instruction.kind == Kind::kBranch || instruction.kind == Kind::kExit;
  }
  std::vector<std::vector<int>> last_at(kernel.code.size());
  for (const Use& use : uses) {
    if (use.is_shared) last_at[use.last].push_back(static_cast<int>(&use - uses.data()));
  }
  std::vector<int> free;
  kernel.registers = 0;
  const auto renumber = [&](int& number) {
    if (number == kNone) return;
    Use& use = use_of(number);
    if (use.number == kNone && use.is_shared && !free.empty()) {
      use.number = free.back();
      free.pop_back();
    } else if (use.number == kNone) {
      use.number = kernel.registers++;
    }
    number = use.number;
  };
  for (size_t at = 0; at < kernel.code.size(); ++at) {
    Instruction& instruction = kernel.code[at];
    renumber(instruction.guard);
    for (int& number : instruction.in) renumber(number);
    for (int& number : instruction.out) renumber(number);
    for (const int number : last_at[at]) free.push_back(use_of(number).number);
  }
  for (auto& [value, number] : kernel.constants) renumber(number);
  for (auto& [special, number] : kernel.specials) renumber(number);
}

// The names of arrays whose sizes launches say.
std::set<std::string> unsized_arrays(const std::string& text) {
  const std::string begin = ".extern .shared ";
  std::set<std::string> names;
  for (size_t at = text.find(begin); at != std::string::npos; at = text.find(begin, at + 1)) {
    names.insert(declared(text.substr(at + begin.size(), text.find(';', at) - at - begin.size())).name);
  }
  return names;
}

std::string without_comments(const std::string& text) {
  std::string rest;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text.compare(i, 2, "//") == 0) i = text.find('\n', i);
    rest += text.at(i);
  }
  return rest;
}

}  // namespace

void stop(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::printf("FAILED: %s\n0 passed, 1 failed\n", what.c_str());
  std::exit(1);
}

std::map<std::string, Kernel> read_program(const std::string& commented) {
  const std::string text = without_comments(commented), entry = ".entry ";
  const std::set<std::string> unsized = unsized_arrays(text);
  std::map<std::string, Kernel> kernels;
  for (size_t at = text.find(entry); at != std::string::npos; at = text.find(entry, at + 1)) {
    const auto line =
        static_cast<int>(std::count(text.begin(), text.begin() + static_cast<int64_t>(at), '\n')) + 1;
    Kernel kernel = Reader(text, at + entry.size(), line, unsized).read();
    share_registers(kernel);
    kernels[kernel.name] = kernel;
  }
  return kernels;
}

}  // namespace hkv::testing::ptx
