// The ceiling of row operations: random rows of float32 are read from a large array and written one after
// the other, with nothing else to do, 16 bytes a thread or four times as many, whichever is faster. Prints
// the bytes moved in a second. FETCH: the bytes that the L2 is to fetch at a time, 32, 64 or 128; without it
// as the driver has it.
//
//     nvcc -O3 -arch=native random_gather.cu -o random_gather && ./random_gather DIM ROWS BATCH [FETCH]
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int kThreads = 256;
constexpr int kRuns = 9;
constexpr int kInARow = 10;
// Batches that take turns, with results of their own: narrow rows of one batch would stay in the L2.
constexpr int kBatches = 8;

void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// SplitMix64: random places, equal on every run.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

struct Batch {
  const float4* rows;
  const int32_t* places;
  float4* out;
  int shift;  // log2 of the loads of a row
  int64_t count;
};

// Threads side by side take loads side by side; a thread's own are all on their way before the first is used.
template <int kLoads>
__global__ void __launch_bounds__(kThreads) gather(Batch batch) {
  const int64_t first = int64_t{blockIdx.x} * kThreads * kLoads + threadIdx.x;
  const int64_t in_row = (int64_t{1} << batch.shift) - 1;
  float4 loaded[kLoads];
#pragma unroll
  for (int k = 0; k < kLoads; ++k) {
    const int64_t wanted = first + k * kThreads;
    const int64_t i = wanted < batch.count ? wanted : batch.count - 1;
    loaded[k] = batch.rows[(int64_t{batch.places[i >> batch.shift]} << batch.shift) + (i & in_row)];
  }
#pragma unroll
  for (int k = 0; k < kLoads; ++k) {
    const int64_t i = first + k * kThreads;
    if (i < batch.count) batch.out[i] = loaded[k];
  }
}

// Seconds of a gather, of batches that take turns: the median.
template <int kLoads>
double timed(const std::vector<Batch>& batches) {
  cudaEvent_t begin, end;
  require(cudaEventCreate(&begin), "cudaEventCreate");
  require(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<double> seconds;
  for (int run = 0; run < kRuns; ++run) {
    require(cudaEventRecord(begin), "cudaEventRecord");
    for (size_t i = 0; i < kInARow; ++i) {
      const Batch& batch = batches[i % batches.size()];
      const int64_t each = int64_t{kThreads} * kLoads;
      gather<kLoads><<<static_cast<unsigned>((batch.count + each - 1) / each), kThreads>>>(batch);
    }
    require(cudaEventRecord(end), "cudaEventRecord");
    require(cudaEventSynchronize(end), "the kernel");
    float milliseconds = 0;
    require(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    seconds.push_back(milliseconds / 1e3 / kInARow);
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[kRuns / 2];
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t dim = argc == 4 || argc == 5 ? std::atoll(argv[1]) : 0;
  if (dim < 4 || !std::has_single_bit(static_cast<uint64_t>(dim))) {
    std::fprintf(stderr, "usage: random_gather DIM ROWS BATCH [FETCH], DIM a power of two from 4 on\n");
    return 2;
  }
  const int64_t fours = dim / 4;
  const int shift = std::countr_zero(static_cast<uint64_t>(fours));
  const int64_t rows = std::atoll(argv[2]);
  const int64_t batch = std::atoll(argv[3]);
  if (argc == 5) {
    require(cudaDeviceSetLimit(cudaLimitMaxL2FetchGranularity, static_cast<size_t>(std::atoll(argv[4]))),
            "cudaDeviceSetLimit");
  }
  float4* values = nullptr;
  float4* out = nullptr;
  int32_t* places = nullptr;
  require(cudaMalloc(&values, sizeof(float4) * fours * rows), "rows");
  require(cudaMalloc(&out, sizeof(float4) * fours * batch * kBatches), "results");
  require(cudaMalloc(&places, sizeof(int32_t) * batch * kBatches), "places");
  require(cudaMemset(values, 1, sizeof(float4) * fours * rows), "cudaMemset");
  std::vector<int32_t> random(static_cast<size_t>(batch * kBatches));
  for (int64_t i = 0; i < batch * kBatches; ++i) {
    random[static_cast<size_t>(i)] =
        static_cast<int32_t>(mix(static_cast<uint64_t>(i)) % static_cast<uint64_t>(rows));
  }
  require(cudaMemcpy(places, random.data(), sizeof(int32_t) * random.size(), cudaMemcpyHostToDevice),
          "upload");
  const int64_t count = fours * batch;
  std::vector<Batch> batches;
  for (int64_t turn = 0; turn < kBatches; ++turn) {
    batches.push_back({values, places + turn * batch, out + turn * count, shift, count});
  }
  const double seconds = std::min(timed<1>(batches), timed<4>(batches));
  std::printf("%.6g\n", 2.0 * sizeof(float4) * static_cast<double>(count) / seconds);
}
