// Machines that operations run on, and a group of them that has to leave the same bytes.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "backends/cpu_executor.h"
#include "checks.h"
#include "host_tiles.h"
#include "store.h"
#include "thread_pool.h"

namespace hkv::testing {

template <class Executor, class Operation>
void reserve(Operation& operation, Arena& arena) {
  if constexpr (requires { operation.template reserve<Executor>(arena); }) {
    operation.template reserve<Executor>(arena);
  }
}

// Bytes of workspace that a bound operation needs.
template <class Executor, class Operation>
size_t workspace_bytes(Operation operation) {
  Arena arena;
  reserve<Executor>(operation, arena);
  return arena.used();
}

// Runs a bound operation; what went wrong, or nothing.
template <class Operation, class Executor>
std::string run_operation(Operation& operation, Executor& executor, void* workspace) {
  Arena arena(workspace);
  reserve<Executor>(operation, arena);
  run_steps(operation, executor);
  return executor.failure();
}

// Where the operations of the list can be called by their names.
class Machine {
 public:
  explicit Machine(std::string name) : name_(std::move(name)) {}
  virtual ~Machine() = default;
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  const std::string& name() const { return name_; }

  std::string call(const std::string& operation, Store& store, const Attributes& attributes,
                   const Names& names) const {
    return calls_.at(operation)(store, attributes, names);
  }

 protected:
  // By `run<Operation>(store, attributes, names)` of the machine itself.
  template <class Self>
  void make_calls(Self& self) {
    AllOperations::visit([this, &self]<class Operation>() {
      calls_[Operation::kName] = [&self](Store& store, const Attributes& attributes, const Names& names) {
        return self.template run<Operation>(store, attributes, names);
      };
    });
  }

 private:
  using Call = std::function<std::string(Store&, const Attributes&, const Names&)>;
  const std::string name_;
  std::map<std::string, Call> calls_;
};

// The store's own memory.
struct HostMemory {
  static void* upload(Buffer& buffer) { return buffer.bytes.data(); }
};

// Workers: what the executor is made of, a pool or a team of threads.
template <class Executor, class Workers>
class HostMachine : public Machine {
 public:
  HostMachine(const std::string& name, int threads, char garbage)
      : Machine(name), workers_(threads), garbage_(garbage) {
    make_calls(*this);
  }

 private:
  friend Machine;

  template <class Operation>
  std::string run(Store& store, const Attributes& attributes, const Names& names) {
    Operation operation;
    HostMemory memory;
    StoreBinder<HostMemory> binder(store, memory, attributes, names, garbage_);
    operation.describe(binder);
    std::vector<char> workspace(workspace_bytes<Executor>(operation), garbage_);
    Executor executor(workers_);
    return run_operation(operation, executor, workspace.data());
  }

  Workers workers_;
  const char garbage_;
};

using CpuMachine = HostMachine<CpuExecutor<ThreadPool>, ThreadPool>;
using TileMachine = HostMachine<HostTileExecutor, Team>;

// Sanitizers need not watch this: there are many bytes, and no step is running.
HKV_UNWATCHED inline bool are_equal(const char* a, const char* b, size_t bytes) {
  using Word [[gnu::may_alias]] = uint64_t;
  size_t i = 0;
  for (; i + sizeof(Word) <= bytes; i += sizeof(Word)) {
    if (*reinterpret_cast<const Word*>(a + i) != *reinterpret_cast<const Word*>(b + i)) return false;
  }
  for (; i < bytes; ++i) {
    if (a[i] != b[i]) return false;
  }
  return true;
}

// The same calls on several machines.
class Together {
 public:
  Together(Checks& checks, std::vector<Machine*> machines)
      : checks_(checks), machines_(std::move(machines)), stores_(machines_.size()) {}

  // An array as the first machine left it; the others' are equal, or it has been reported.
  const Buffer& operator[](const std::string& name) const { return stores_[0].at(name); }

  void set(const std::string& name, const Buffer& buffer) {
    for (Store& store : stores_) store[name] = buffer;
  }
  void clear() {
    for (Store& store : stores_) store.clear();
  }

  void call(const std::string& operation, const std::string& where, const Attributes& attributes,
            const Names& names) {
    called_.insert(operation);
    for (size_t i = 0; i < machines_.size(); ++i) {
      const std::string what = operation + " on " + machines_[i]->name() + ", " + where;
      const std::string failure = machines_[i]->call(operation, stores_[i], attributes, names);
      checks_.expect(failure.empty(), what + ": " + failure);
      if (i > 0) compare(what, stores_[i]);
    }
  }

  // That no operation of the list was forgotten.
  void expect_all_called() {
    AllOperations::visit([this]<class Operation>() {
      checks_.expect(called_.contains(Operation::kName), std::string(Operation::kName) + " was never called");
    });
  }

 private:
  void compare(const std::string& what, const Store& store) {
    for (const auto& [name, buffer] : stores_[0]) {
      const Buffer& other = store.at(name);
      const bool is_same = other.rows == buffer.rows && other.bytes.size() == buffer.bytes.size() &&
                           are_equal(other.bytes.data(), buffer.bytes.data(), buffer.bytes.size());
      checks_.expect(is_same, what + ": " + name);
    }
  }

  Checks& checks_;
  const std::vector<Machine*> machines_;
  std::vector<Store> stores_;
  std::set<std::string> called_;
};

}  // namespace hkv::testing
