// Sums and gathers between the ranks of one host through one shared mapping.
//
//     header   [ranks] lines of 64 bytes: how many collectives the rank has brought its part to, its process id
//     data     [2] [ranks] [slot]: the parts; a collective uses half `seq % 2`
//
//     bring: copy my part into my slot, then arrived[me] = seq      (release)
//     wait:  arrived[every rank] >= seq                             (acquire)
//     take:  add up all slots in rank order, in float32, rounded once: the same bits on every rank
//
// Two halves are enough: whoever brings to collective seq + 2 has seen every rank arrive at seq + 1, so all have taken seq.
// A wait spins for a moment and then sleeps on the word that the late rank writes: ranks may have fewer cores than threads.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>

#include "../native/vector.h"

using namespace mstar;

namespace {

struct Line {
  alignas(64) std::atomic<uint32_t> arrived;
  std::atomic<uint32_t> sleepers;  // ranks that sleep until `arrived` changes
  std::atomic<int32_t> process;
};
static_assert(sizeof(Line) == 64 && std::atomic<uint32_t>::is_always_lock_free, "shared between processes");

constexpr int64_t kWakeNs = 50'000'000;  // how often a sleeper looks whether the late rank still lives

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Gone, or dead and not yet waited for. One that has not joined yet is neither.
bool is_gone(int32_t process) {
  if (process == 0) return false;
  char path[32], text[512];
  std::snprintf(path, sizeof path, "/proc/%d/stat", process);
  FILE* file = std::fopen(path, "r");
  if (file == nullptr) return true;
  text[std::fread(text, 1, sizeof text - 1, file)] = 0;
  std::fclose(file);
  const char* name_end = std::strrchr(text, ')');
  return name_end == nullptr || name_end[1] == 0 || name_end[2] == 'Z' || name_end[2] == 'X';
}

}  // namespace

extern "C" {

struct HostMemory {  // one rank's handle
  void* mapping;
  int64_t rank, ranks, slot_bytes;
  int64_t spin_ns, timeout_ns;
  int64_t can_probe;  // whether the ranks see each other's process ids
  uint32_t seq;
};

int64_t mstar_host_memory_bytes(int64_t ranks, int64_t slot_bytes) { return ranks * 64 + 2 * ranks * slot_bytes; }

void mstar_host_memory_join(HostMemory* memory) {
  static_cast<Line*>(memory->mapping)[memory->rank].process.store(getpid(), std::memory_order_release);
}
}

namespace {

Line& line(const HostMemory& memory, int64_t rank) { return static_cast<Line*>(memory.mapping)[rank]; }
char* slot(const HostMemory& memory, int64_t rank) {
  return static_cast<char*>(memory.mapping) + memory.ranks * 64 + ((memory.seq % 2) * memory.ranks + rank) * memory.slot_bytes;
}

void arrive(HostMemory& memory) {
  Line& mine = line(memory, memory.rank);
  mine.arrived.store(memory.seq, std::memory_order_seq_cst);
  if (mine.sleepers.load(std::memory_order_seq_cst) != 0)
    syscall(SYS_futex, &mine.arrived, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

bool has_arrived(const HostMemory& memory, const Line& peer) {
  return static_cast<int32_t>(peer.arrived.load(std::memory_order_acquire) - memory.seq) >= 0;
}

// 0, or 1 + the rank that did not come in time or is gone.
int64_t wait_for(const HostMemory& memory, int64_t rank) {
  Line& peer = line(memory, rank);
  if (has_arrived(memory, peer)) return 0;
  const int64_t began = now_ns();
  while (now_ns() - began < memory.spin_ns) {
    for (int i = 0; i < 32; ++i) {
      if (has_arrived(memory, peer)) return 0;
      pause_cpu();
    }
  }
  int64_t failed = 0;
  peer.sleepers.fetch_add(1, std::memory_order_seq_cst);
  while (failed == 0) {
    const uint32_t seen = peer.arrived.load(std::memory_order_seq_cst);
    if (has_arrived(memory, peer)) break;
    const timespec step{0, kWakeNs};
    syscall(SYS_futex, &peer.arrived, FUTEX_WAIT, seen, &step, nullptr, 0);
    if (has_arrived(memory, peer)) break;
    const bool gone = memory.can_probe && is_gone(peer.process.load(std::memory_order_acquire)) && !has_arrived(memory, peer);
    if (gone || now_ns() - began > memory.timeout_ns) failed = 1 + rank;
  }
  peer.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return failed;
}

template <typename T>
void add_up(const HostMemory& memory, T* x, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    vfloat total = load_some(reinterpret_cast<const T*>(slot(memory, 0)) + i, count - i);
    for (int64_t rank = 1; rank < memory.ranks; ++rank) total += load_some(reinterpret_cast<const T*>(slot(memory, rank)) + i, count - i);
    store_some(total, x + i, count - i);
  }
}

int64_t wait_for_all(const HostMemory& memory) {
  for (int64_t rank = 0; rank < memory.ranks; ++rank)
    if (const int64_t failed = wait_for(memory, rank)) return failed;
  return 0;
}

}  // namespace

extern "C" {

// Sum of `x [count]` over the ranks, in place. 0, or 1 + the rank that is missing; then nothing more may be asked of this memory.
int64_t mstar_host_memory_sum(HostMemory* memory, void* x, int64_t count, int64_t is_bf16) {
  const int64_t size = is_bf16 ? 2 : 4, most = memory->slot_bytes / size;
  for (int64_t done = 0; done < count; done += most) {
    const int64_t some = count - done < most ? count - done : most;
    char* part = static_cast<char*>(x) + done * size;
    ++memory->seq;
    std::memcpy(slot(*memory, memory->rank), part, some * size);
    arrive(*memory);
    if (const int64_t failed = wait_for_all(*memory)) return failed;
    if (is_bf16)
      add_up(*memory, reinterpret_cast<Bf16*>(part), some);
    else
      add_up(*memory, reinterpret_cast<float*>(part), some);
  }
  return 0;
}

// Columns side by side: rank r brings `[rows, starts[r + 1] - starts[r]]` bytes; `out [rows, starts[ranks]]`. A row's
// part must fit into a slot. Returns as the sum does.
int64_t mstar_host_memory_gather(HostMemory* memory, const void* mine, int64_t rows, const int64_t* starts, void* out) {
  const int64_t ranks = memory->ranks, total = starts[ranks];
  int64_t widest = 1;
  for (int64_t r = 0; r < ranks; ++r) widest = starts[r + 1] - starts[r] > widest ? starts[r + 1] - starts[r] : widest;
  const int64_t at_once = memory->slot_bytes / widest;
  for (int64_t done = 0; done < rows; done += at_once) {
    const int64_t some = rows - done < at_once ? rows - done : at_once;
    const int64_t own = starts[memory->rank + 1] - starts[memory->rank];
    ++memory->seq;
    std::memcpy(slot(*memory, memory->rank), static_cast<const char*>(mine) + done * own, some * own);
    arrive(*memory);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      if (const int64_t failed = wait_for(*memory, rank)) return failed;
      const int64_t width = starts[rank + 1] - starts[rank];
      for (int64_t row = 0; row < some; ++row)
        std::memcpy(static_cast<char*>(out) + (done + row) * total + starts[rank], slot(*memory, rank) + row * width, width);
    }
  }
  return 0;
}
}
