// What XLA may hand to a handler, and is told when that is wrong: no operation runs on it. Python's checks
// stand before these, so that no test in Python gets here; and no executor on a CPU can fail.
#include <array>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "binding/handler.h"
#include "checks.h"

namespace {

using namespace hkv;

// An argument of every kind.
struct Everything {
  static constexpr const char* kName = "everything";
  [[maybe_unused]] static constexpr bool kPerPosition = false;
  int64_t bytes = 0;
  float fill = 0.0f;
  Array<uint32_t> clock;
  int64_t steps = 0;
  RowsView cast, values, states, sums, rows, norms;
  Array<Words> keys;
  Array<int32_t> counts;

  template <class Binder>
  void describe(Binder& binder) {
    binder.attribute("bytes", bytes);
    binder.attribute("fill", fill);
    binder.attribute("steps", steps);
    binder.out_cast("cast", cast, "m ...");  // before there are rows whose type it could have
    binder.inout("clock", clock, "2");
    binder.in("values", values, "S ...");
    binder.in_floats("states", states, "S");
    binder.in_floats("sums", sums, "n ...");
    binder.in("keys", keys, "n? 2");
    binder.in("counts", counts, "steps");
    binder.out("rows", rows, "n ...");
    binder.out_float32("norms", norms, "n ...");
  }

  const char* complaint() const { return bytes < 0 ? "bytes: there are none to give back" : nullptr; }

  template <class Executor>
  void reserve(Arena& arena) {
    arena.take<char>(bytes);
  }

  template <class Executor>
  void run(Executor& executor) const {
    executor.ran = this;
    executor.is_bound = fill == 0.5f && values.type == RowType::kBfloat16 && values.count == 9 &&
                        values.width == 6 && values.row_bytes == 12 && states.width == 1 &&
                        sums.row_bytes == 24 && rows.row_bytes == 12 && rows.count == 4 && keys.rows == 4 &&
                        cast.type == RowType::kFloat16 && norms.row_bytes == 24 && counts.rows == 5;
  }
};

struct NotingExecutor {
  const void* ran = nullptr;
  bool is_bound = false;
  std::string complaint;

  std::string failure() const { return complaint; }
};

struct Call {
  struct Buffer {
    XLA_FFI_DataType type;
    std::vector<int64_t> shape;
    char* data;
  };
  std::map<std::string, int64_t> attributes = {{"bytes", 300}, {"fill", 0x3f000000}, {"steps", 5}};
  std::vector<Buffer> operands, results;

  explicit Call(char* memory)
      : operands{
            {XLA_FFI_DataType_U32, {2}, memory},           {XLA_FFI_DataType_BF16, {9, 2, 3}, memory + 1024},
            {XLA_FFI_DataType_F16, {9}, memory + 2048},    {XLA_FFI_DataType_F32, {4, 2, 3}, memory + 3072},
            {XLA_FFI_DataType_U32, {4, 2}, memory + 4096}, {XLA_FFI_DataType_S32, {5}, memory + 4608}},
        results{{XLA_FFI_DataType_F16, {7, 2, 3}, memory + 7168},
                {XLA_FFI_DataType_U32, {2}, memory},
                {XLA_FFI_DataType_BF16, {4, 2, 3}, memory + 5120},
                {XLA_FFI_DataType_F32, {4, 2, 3}, memory + 5632},
                {XLA_FFI_DataType_U8, {512}, memory + 6144}} {}

  // As XLA does it.
  ffi::Error run(NotingExecutor& executor) {
    std::vector<XLA_FFI_Buffer> given;
    for (std::vector<Buffer>* list : {&operands, &results}) {
      for (Buffer& one : *list) {
        given.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, one.type, one.data,
                         static_cast<int64_t>(one.shape.size()), one.shape.data()});
      }
    }
    std::vector<void*> addresses;
    for (XLA_FFI_Buffer& buffer : given) addresses.push_back(&buffer);
    std::vector<XLA_FFI_ArgType> kinds(operands.size(), XLA_FFI_ArgType_BUFFER);
    std::vector<XLA_FFI_RetType> ret_kinds(results.size(), XLA_FFI_RetType_BUFFER);
    const XLA_FFI_Args args{XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(operands.size()),
                            kinds.data(), addresses.data()};
    const XLA_FFI_Rets rets{XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(results.size()),
                            ret_kinds.data(), addresses.data() + operands.size()};
    std::vector<XLA_FFI_Scalar> scalars;
    std::vector<XLA_FFI_ByteSpan> names;
    for (auto& [name, value] : attributes) {
      scalars.push_back({XLA_FFI_DataType_S64, &value});
      names.push_back({name.data(), name.size()});
    }
    std::vector<void*> values;
    for (XLA_FFI_Scalar& scalar : scalars) values.push_back(&scalar);
    std::vector<XLA_FFI_ByteSpan*> spans;
    for (XLA_FFI_ByteSpan& name : names) spans.push_back(&name);
    std::vector<XLA_FFI_AttrType> types(scalars.size(), XLA_FFI_AttrType_SCALAR);
    const XLA_FFI_Attrs attrs{XLA_FFI_Attrs_STRUCT_SIZE,
                              nullptr,
                              static_cast<int64_t>(scalars.size()),
                              types.data(),
                              spans.data(),
                              values.data()};
    return execute<Everything>(executor, ffi::RemainingArgs(&args, 0), ffi::RemainingRets(&rets, 0),
                               ffi::Dictionary(&attrs));
  }
};

alignas(256) std::array<char, 8192> memory;

// What is changed in a call that is right otherwise, and what the error says of it.
template <class Change>
void expect_refusal(testing::Checks& checks, ffi::ErrorCode code, const std::string& text,
                    const Change& change) {
  NotingExecutor executor;
  Call call(memory.data());
  change(call);
  const ffi::Error error = call.run(executor);
  checks.expect(error.failure() && error.errc() == code && error.message().find(text) != std::string::npos,
                "no \"" + text + "\" in: " + error.message());
  checks.expect(executor.ran == nullptr, text + ": and the operation ran");
}

}  // namespace

int main() {
  testing::Checks checks;
  constexpr auto kWrong = ffi::ErrorCode::kInvalidArgument;
  constexpr auto kInternal = ffi::ErrorCode::kInternal;
  {
    NotingExecutor executor;
    checks.expect(Call(memory.data()).run(executor).success() && executor.is_bound, "a call that is right");
    executor.complaint = "the machine is on fire";
    const ffi::Error error = Call(memory.data()).run(executor);
    checks.expect(error.failure() && error.errc() == kInternal &&
                      error.message() == "jax_hkv everything on a table: the machine is on fire",
                  "what the machine complains of: " + error.message());
    Call absent(memory.data());
    absent.operands[4].shape = {0, 2};
    executor.complaint = "";
    checks.expect(absent.run(executor).success() && !executor.is_bound, "an operand that may be absent");
  }
  expect_refusal(checks, kWrong, "attribute bytes is missing", [](Call& c) { c.attributes.erase("bytes"); });
  expect_refusal(checks, kWrong, "attribute fill is missing", [](Call& c) { c.attributes.erase("fill"); });
  expect_refusal(checks, kWrong, "result workspace is missing", [](Call& c) { c.results.pop_back(); });
  expect_refusal(checks, kWrong, "operand counts is missing", [](Call& c) { c.operands.pop_back(); });
  expect_refusal(checks, kWrong, "on a table: bytes: there are none to give back",
                 [](Call& c) { c.attributes["bytes"] = -1; });
  expect_refusal(checks, kInternal, "512 bytes, 768 are needed",
                 [](Call& c) { c.attributes["bytes"] = 513; });
  expect_refusal(checks, kInternal, "clock is not updated in place",
                 [](Call& c) { c.results[1].data += 64; });
  const auto result_type = [&](const std::string& text, size_t result, XLA_FFI_DataType other) {
    expect_refusal(checks, kWrong, text, [=](Call& c) { c.results[result].type = other; });
  };
  result_type("cast: expected float32, bfloat16 or float16", 0, XLA_FFI_DataType_S32);
  result_type("norms: expected element type", 3, XLA_FFI_DataType_BF16);
  const auto type = [&](std::string_view text, size_t operand, XLA_FFI_DataType other) {
    expect_refusal(checks, kWrong, std::string(text), [=](Call& c) { c.operands[operand].type = other; });
  };
  type("clock: expected element type", 0, XLA_FFI_DataType_S32);
  type("rows: expected element type", 1, XLA_FFI_DataType_F16);  // the call's first rows name it
  type("states: expected float32, bfloat16 or float16", 2, XLA_FFI_DataType_S16);
  type("sums: expected float32, bfloat16 or float16", 3, XLA_FFI_DataType_S32);
  type("keys: expected element type", 4, XLA_FFI_DataType_F32);
  const auto shape = [&](std::string_view text, size_t operand, const std::vector<int64_t>& other) {
    expect_refusal(checks, kWrong, std::string(text), [=](Call& c) { c.operands[operand].shape = other; });
  };
  shape("clock: expected shape [2], got [3]", 0, {3});
  shape("clock: expected shape [2], got [2, 1]", 0, {2, 1});
  shape("clock: expected shape [2], got []", 0, {});
  shape("states: expected shape [S] with S = 9, got [8]", 2, {8});
  shape("sums: expected shape [n ...] with n = 4, rows of [2, 3], got [4, 3, 2]", 3, {4, 3, 2});
  shape("sums: expected shape [n ...] with n = 4, rows of [2, 3], got [4, 2]", 3, {4, 2});
  shape("keys: expected shape [n? 2] with n = 4, got [3, 2]", 4, {3, 2});
  shape("keys: expected shape [n? 2] with n = 4, got [1, 2]", 4, {1, 2});
  shape("keys: expected shape [n? 2] with n = 4, got [4]", 4, {4});
  shape("counts: expected shape [steps] with steps = 5, got [6]", 5, {6});
  return checks.finish();
}
