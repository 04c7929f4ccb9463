// What torch asks of every accelerator: devices, streams and events, a generator, page-locked memory.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace late {
namespace {

using at::Tensor;

constexpr auto kLate = c10::DeviceType::PrivateUse1;
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::Device device_of(int index) {
  return {kLate, c10::DeviceIndex(index)};
}

struct OnDevice {  // a guard
  explicit OnDevice(int device) : before(current_device) {
    current_device = device;
  }
  ~OnDevice() {
    current_device = before;
  }
  int before;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kLate;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return device_of(std::exchange(current_device, device.has_index() ? int(device.index()) : current_device));
  }
  c10::Device getDevice() const override {
    return device_of(current_device);
  }
  void setDevice(c10::Device device) const override {
    exchangeDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    exchangeDevice(device);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  static c10::Stream named(c10::Device device, int id) {
    return c10::Stream(c10::Stream::UNSAFE, device, id);
  }
  static c10::Device with_index(c10::Device device) {
    return device.has_index() ? device : device_of(current_device);
  }
  c10::Stream getStream(c10::Device device) const override {
    device = with_index(device);
    return named(device, current_ids[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return named(with_index(device), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<int> next[kDevices] = {};
    device = with_index(device);
    return named(device, 1 + next[device.index()]++ % (kStreams - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    return named(to.device(), std::exchange(current_ids[to.device_index()], int(to.id())));
  }
  static Stream& real(const c10::Stream& named) {
    return stream(named.device_index(), int(named.id()));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<std::shared_ptr<Event>*>(event);
  }
  void record(void** event, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag) const override {
    destroyEvent(*event, 0);
    auto mark = std::make_shared<Event>();
    mark->on = &real(on);
    mark->ticket = mark->on->submit(
        [mark] {
          using namespace std::chrono;
          mark->seconds = duration<double>(steady_clock::now().time_since_epoch()).count();
        },
        false);
    *event = new std::shared_ptr<Event>(mark);
  }
  static Event* mark(void* event) {
    return event ? static_cast<std::shared_ptr<Event>*>(event)->get() : nullptr;
  }
  void block(void* event, const c10::Stream& on) const override {
    if (Event* found = mark(event)) order(real(on), *found->on, found->ticket);
  }
  bool queryEvent(void* event) const override {
    return !event || mark(event)->is_done();
  }
  void synchronizeEvent(void* event) const override {
    if (event) mark(event)->finish();
    fault().raise();
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    synchronizeEvent(from), synchronizeEvent(to);
    return 1000 * (mark(to)->seconds - mark(from)->seconds);
  }
  bool queryStream(const c10::Stream& on) const override {
    return real(on).is_done(real(on).submitted());
  }
  void synchronizeStream(const c10::Stream& on) const override {
    real(on).finish(real(on).submitted());
    fault().raise();
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    synchronise(device < 0 ? current_device : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& on) const override {
    allocator().recordStream(data, on);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// A generator of seed and offset. Each operator that draws takes one offset, when it is queued.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(int device) : GeneratorImpl(device_of(device), kKeys) {}
  void set_current_seed(uint64_t seed) override {
    seed_ = seed, offset_ = 0;
  }
  void set_offset(uint64_t offset) override {
    offset_ = offset;
  }
  uint64_t get_offset() const override {
    return offset_;
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.is_cpu(), "expected a state of 16 bytes on the CPU");
    auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    Tensor state(at::detail::empty_cpu({16}, at::kByte));
    auto* words = static_cast<uint64_t*>(state.mutable_data_ptr());
    words[0] = seed_, words[1] = offset_;
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* made = new Generator(device_.index());
    made->seed_ = seed_, made->offset_ = offset_;
    return made;
  }
  // Return the generator of a kernel on the CPU that draws what this one draws next.
  at::Generator draw() {
    std::lock_guard<std::mutex> lock(mutex_);
    auto made = at::detail::createCPUGenerator();
    made.set_current_seed((seed_ * 0x9E3779B97F4A7C15u) ^ (offset_++ * 0xD1B54A32D192ED03u));
    return made;
  }

 private:
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};
const at::Generator& default_generator(int device) {
  static auto* all = new std::vector<at::Generator>{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return (*all)[device < 0 ? current_device : device];
}
at::Generator drawn(const std::optional<at::Generator>& given, int device) {
  const at::Generator& source = given.has_value() && given->defined() ? *given : default_generator(device);
  return static_cast<Generator*>(source.unsafeGetGeneratorImpl())->draw();
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    current_device = device;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return c10::DeviceIndex(current_device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return c10::DeviceIndex(std::exchange(current_device, int(device)));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device : device);
  }
  bool isPinnedPtr(const void* data) const override {
    return Pinned::has(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* one = new Pinned();
    return one;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    OnDevice guard(storage.device().index());
    auto made = allocator().allocate(num_bytes);
    if (const size_t kept = std::min(num_bytes, storage.nbytes()))
      current(current_device).submit([to = made.get(), from = storage.data(), kept] { std::memcpy(to, from, kept); }, true);
    storage.set_data_ptr_noswap(std::move(made));
    storage.set_nbytes(num_bytes);
  }
};
const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  c10::SetAllocator(kLate, &allocator());
  return true;
}();

}  // namespace
}  // namespace late
