// The caching allocator of the late device. Device memory is host memory.
//
// It works in the order of the host, as CUDA's does: a freed block may be handed out again on the stream it was
// allocated on, at once. A block that other streams have used (`record_stream`) is handed out again when these streams
// have passed the point at which it was freed. When the stream of a block reaches the free, the block is filled with a
// pattern, so that whoever reads it out of order reads garbage. A program with several streams may order them between a
// free and the next use of the memory, and rely on the bytes until then: for it, the block is filled when it is handed
// out again.
#pragma once

#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <set>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "streams.h"

namespace late {

constexpr size_t kRounding = 512;
constexpr int kPoison = 0xA5;
constexpr size_t kMemory = size_t(4) << 30;

inline std::atomic<bool> poisons_at_free{true};

struct Block {
  void* data;
  size_t size, requested;
  Stream* owner;
  std::set<Stream*> users;
  std::vector<std::pair<Stream*, uint64_t>> last_uses;
};

struct Pool {
  std::mutex mutex;
  std::map<Stream*, std::multimap<size_t, Block*>> unused;
  std::list<Block*> in_use_elsewhere;
  c10::CachingDeviceAllocator::DeviceStats stats;
  // Bytes as requested that no other tensor can have: alive, or used by another stream that has not passed the free.
  c10::CachingAllocator::Stat held;

  Block* take(Stream& on, size_t num_bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    reap();
    const size_t size = (num_bytes + kRounding - 1) / kRounding * kRounding;
    auto& mine = unused[&on];
    auto found = mine.lower_bound(size);
    Block* block;
    if (found != mine.end() && found->first <= 2 * size) {
      found = std::prev(mine.upper_bound(found->first));  // what was freed last: the most likely to be in use still
      block = found->second;
      mine.erase(found);
      if (!poisons_at_free) poison(block);
    } else {
      block = new Block{std::aligned_alloc(kRounding, size), size, 0, &on, {}, {}};
      std::memset(block->data, kPoison, size);
      stats.reserved_bytes[0].increase(size);
      stats.segment[0].increase(1);
    }
    block->requested = num_bytes;
    stats.allocation[0].increase(1);
    stats.allocated_bytes[0].increase(block->size);
    stats.active_bytes[0].increase(block->size);
    stats.requested_bytes[0].increase(num_bytes);
    held.increase(num_bytes);
    return block;
  }

  void give(Block* block) {
    std::lock_guard<std::mutex> lock(mutex);
    stats.allocation[0].decrease(1);
    stats.allocated_bytes[0].decrease(block->size);
    stats.requested_bytes[0].decrease(block->requested);
    for (Stream* user : block->users) block->last_uses.emplace_back(user, user->submitted());
    block->users.clear();
    block->last_uses.empty() ? put_back(block) : in_use_elsewhere.push_back(block);
  }

  // With the mutex: see which blocks their users have passed.
  void reap() {
    for (auto it = in_use_elsewhere.begin(); it != in_use_elsewhere.end();) {
      bool done = true;
      for (auto& [user, ticket] : (*it)->last_uses) done = done && user->is_done(ticket);
      if (!done) {
        ++it;
        continue;
      }
      (*it)->last_uses.clear();
      put_back(*it);
      it = in_use_elsewhere.erase(it);
    }
  }

  // With the mutex.
  void empty() {
    reap();
    for (auto& [on, blocks] : unused) {
      on->finish(on->submitted());
      for (auto& [size, block] : blocks) {
        stats.reserved_bytes[0].decrease(size);
        stats.segment[0].decrease(1);
        std::free(block->data);
        delete block;
      }
      blocks.clear();
    }
  }

 private:
  static void poison(Block* block) {
    block->owner->submit([data = block->data, size = block->size] { std::memset(data, kPoison, size); }, false);
  }
  void put_back(Block* block) {
    stats.active_bytes[0].decrease(block->size);
    held.decrease(block->requested);
    if (poisons_at_free) poison(block);
    unused[block->owner].emplace(block->size, block);
  }
};

inline Pool& pool(int device) {
  static Pool* all = new Pool[kDevices];
  return all[device];
}

struct Allocator final : c10::DeviceAllocator {
  static void free(void* context) {
    auto* block = static_cast<Block*>(context);
    if (block) pool(block->owner->device).give(block);
  }
  c10::DataPtr allocate(size_t num_bytes) override {
    const c10::Device device(c10::DeviceType::PrivateUse1, c10::DeviceIndex(current_device));
    if (!num_bytes) return {nullptr, nullptr, &Allocator::free, device};
    Block* block = pool(current_device).take(current(current_device), num_bytes);
    return {block->data, block, &Allocator::free, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    current(current_device).submit([=] { std::memcpy(to, from, num_bytes); }, true);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < kDevices; ++device) {
      std::lock_guard<std::mutex> lock(pool(device).mutex);
      pool(device).empty();
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream used_by) override {
    auto* block = static_cast<Block*>(data.get_context());
    if (!block) return;
    Stream& user = stream(used_by.device_index(), int(used_by.id()));
    std::lock_guard<std::mutex> lock(pool(block->owner->device).mutex);
    if (&user != block->owner) block->users.insert(&user);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(pool(device).mutex);
    return pool(device).stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(pool(device).mutex);
    auto& stats = pool(device).stats;
    for (auto* array : {&stats.allocation, &stats.segment, &stats.allocated_bytes, &stats.reserved_bytes,
                        &stats.active_bytes, &stats.requested_bytes})
      (*array)[0].reset_peak();
    pool(device).held.reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(pool(device).mutex);
    return {kMemory - size_t(pool(device).stats.reserved_bytes[0].current), kMemory};
  }
};
inline Allocator& allocator() {
  static Allocator* one = new Allocator();
  return *one;
}

// Page-locked host memory: ordinary memory that is known to the device.
struct Pinned final : c10::Allocator {
  static std::map<const char*, size_t>& blocks() {
    static auto* all = new std::map<const char*, size_t>();
    return *all;
  }
  static std::mutex& mutex() {
    static auto* one = new std::mutex();
    return *one;
  }
  static bool has(const void* data) {
    std::lock_guard<std::mutex> lock(mutex());
    auto next = blocks().upper_bound(static_cast<const char*>(data));
    if (next == blocks().begin()) return false;
    auto& [start, size] = *std::prev(next);
    return static_cast<const char*>(data) < start + size;
  }
  static void free(void* data) {
    if (!data) return;
    std::lock_guard<std::mutex> lock(mutex());
    auto found = blocks().find(static_cast<char*>(data));
    std::memset(data, kPoison, found->second);
    blocks().erase(found);
    std::free(data);
  }
  c10::DataPtr allocate(size_t num_bytes) override {
    const size_t size = std::max<size_t>((num_bytes + 63) / 64 * 64, 64);
    void* data = std::aligned_alloc(64, size);
    std::lock_guard<std::mutex> lock(mutex());
    blocks()[static_cast<char*>(data)] = size;
    return {data, data, &Pinned::free, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &Pinned::free;
  }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    std::memcpy(to, from, num_bytes);
  }
};

}  // namespace late
