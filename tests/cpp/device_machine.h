// Where operations run with the CUDA executor, launched or captured into a graph.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "backends/cuda_executor.h"
#include "machines.h"

namespace hkv::testing {

inline void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n0 passed, 1 failed\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// Arrays of the device, for the time of one call.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  ~DeviceMemory() {
    for (void* address : addresses_) require(cudaFree(address), "cudaFree");
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void* take(size_t bytes) {
    void* address = nullptr;
    require(cudaMalloc(&address, std::max<size_t>(bytes, 1)), "cudaMalloc");
    addresses_.push_back(address);
    return address;
  }
  void* upload(Buffer& buffer) {
    void* address = take(buffer.bytes.size());
    require(cudaMemcpy(address, buffer.bytes.data(), buffer.bytes.size(), cudaMemcpyHostToDevice), "upload");
    uploaded_.emplace_back(&buffer, address);
    return address;
  }
  // What was uploaded, as it was.
  void restore() const {
    for (const auto& [buffer, address] : uploaded_) {
      require(cudaMemcpy(address, buffer->bytes.data(), buffer->bytes.size(), cudaMemcpyHostToDevice),
              "upload");
    }
  }
  void download() const {
    for (const auto& [buffer, address] : uploaded_) {
      require(cudaMemcpy(buffer->bytes.data(), address, buffer->bytes.size(), cudaMemcpyDeviceToHost),
              "download");
    }
  }

 private:
  std::vector<void*> addresses_;
  std::vector<std::pair<Buffer*, void*>> uploaded_;
};

class CudaMachine : public Machine {
 public:
  CudaMachine(const std::string& name, bool is_captured, char garbage)
      : Machine(name), is_captured_(is_captured), garbage_(garbage) {
    require(cudaStreamCreate(&stream_), "cudaStreamCreate");
    make_calls(*this);
  }
  ~CudaMachine() override { require(cudaStreamDestroy(stream_), "cudaStreamDestroy"); }

 private:
  friend Machine;

  // The workspace is left as it came: initcheck reports what is read before it is written.
  template <class Operation>
  std::string run(Store& store, const Attributes& attributes, const Names& names) {
    Operation operation;
    DeviceMemory memory;
    StoreBinder<DeviceMemory> binder(store, memory, attributes, names, garbage_);
    operation.describe(binder);
    void* workspace = memory.take(workspace_bytes<CudaExecutor>(operation));
    const std::string failure =
        is_captured_ ? capture(operation, workspace, memory) : launch(operation, workspace);
    require(cudaStreamSynchronize(stream_), where(Operation::kName, failure).c_str());
    memory.download();
    return failure;
  }

  // A device that has failed once answers nothing more: what is known is said at once.
  std::string where(const char* operation, const std::string& failure) const {
    return std::string(operation) + " on " + name() + (failure.empty() ? "" : " (" + failure + ")");
  }

  template <class Operation>
  std::string launch(Operation& operation, void* workspace) {
    CudaExecutor executor(stream_);
    return run_operation(operation, executor, workspace);
  }

  // As XLA does for a command buffer: the handler runs under capture, the graph later, and again, when the
  // workspace is no longer what it was.
  template <class Operation>
  std::string capture(Operation& operation, void* workspace, const DeviceMemory& memory) {
    require(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    const std::string failure = launch(operation, workspace);
    cudaGraph_t graph;
    require(cudaStreamEndCapture(stream_, &graph), where("cudaStreamEndCapture", failure).c_str());
    cudaGraphExec_t executable;
    require(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
    for (int turn = 0; turn < 2; ++turn) {
      memory.restore();
      require(cudaGraphLaunch(executable, stream_), where("cudaGraphLaunch", Operation::kName).c_str());
      require(cudaStreamSynchronize(stream_), where("cudaStreamSynchronize", Operation::kName).c_str());
    }
    require(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
    require(cudaGraphDestroy(graph), "cudaGraphDestroy");
    return failure;
  }

  cudaStream_t stream_ = nullptr;
  const bool is_captured_;
  const char garbage_;
};

}  // namespace hkv::testing
