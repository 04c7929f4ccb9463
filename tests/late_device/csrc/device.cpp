// A device that is late: an accelerator without hardware, for tests of what runs on streams.
//
// Its memory is host memory, its kernels are the CPU's. An operator returns at once, with shapes from its meta kernel;
// the work is queued on the current stream, a thread, with raw pointers: as on a real device, nothing but the order of
// streams, events and the allocator protects the bytes. Tests make a stream late (`late_set_lag`) or hold it until
// somebody waits (`late_hold`). Where there is no meta kernel, or a result is a number, the host waits.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <iomanip>
#include <sstream>
#include <unordered_map>

#include "backend.h"

namespace late {
namespace {

using c10::IValue;
using torch::jit::Stack;

std::atomic<bool> records_streams{true};

// --- tensors --------------------------------------------------------------------------------------------------------

bool is_late(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kLate;
}

Tensor new_tensor(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype, int device) {
  OnDevice guard(device);
  return at::detail::empty_strided_generic(size, stride, &allocator(), kKeys, dtype);
}

// The same bytes, as a kernel of the CPU sees them. Holds nothing.
Tensor on_host(const Tensor& tensor) {
  const auto& from = tensor.storage();
  c10::Storage storage(c10::Storage::use_byte_size_t(), from.nbytes(),
                       c10::DataPtr(const_cast<void*>(from.data()), c10::Device(c10::kCPU)), nullptr, false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                       tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return made;
}

// A tensor of the host as a kernel that runs later may read it: the program may write to it in the meantime.
Tensor kept(const Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  return tensor.clone();
}

Tensor on_meta(const Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;  // a number
  return Tensor(at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type()));
}

void resize(const Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(size, stride);
  const size_t needed = at::detail::computeStorageNbytes(size, stride, tensor.itemsize(), tensor.storage_offset());
  if (needed > tensor.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), needed);
}

// --- every operator -------------------------------------------------------------------------------------------------

using Mapping = std::function<Tensor(const Tensor&)>;

// Return a value with every defined tensor in it exchanged.
IValue mapped(const IValue& value, const Mapping& change) {
  auto one = [&](const Tensor& tensor) { return tensor.defined() ? change(tensor) : tensor; };
  if (value.isTensor()) return one(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& tensor : value.toTensorVector()) made.push_back(one(tensor));
    return made;
  }
  if (value.isList() && value.toListRef().size() && value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const IValue& item : value.toListRef())
      item.isNone() ? made.push_back(std::nullopt) : made.push_back(one(item.toTensor()));
    return made;
  }
  return value;
}

void each(const IValue& value, const std::function<void(const Tensor&)>& look) {
  mapped(value, [&](const Tensor& tensor) { return look(tensor), tensor; });
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// Everything about a call that shapes may depend on.
std::string signature(const c10::OperatorHandle& op, const Stack& arguments) {
  std::ostringstream text;
  text << std::setprecision(17) << op.operator_name();
  for (const IValue& value : arguments) {
    size_t num_tensors = 0;
    each(value, [&](const Tensor& tensor) {
      text << '|' << tensor.sizes() << tensor.strides() << tensor.scalar_type() << tensor.device().type()
           << tensor.unsafeGetTensorImpl()->is_wrapped_number();
      ++num_tensors;
    });
    if (value.isList() && (num_tensors || value.isTensorList() || value.isOptionalTensorList())) {
      for (const IValue& item : value.toListRef()) text << (item.isTensor() && item.toTensor().defined());
    } else if (!value.isTensor() && !value.isGenerator()) {
      text << '|' << value;
    }
  }
  return text.str();
}

std::optional<Stack> computed_metas(const c10::OperatorHandle& op, const Stack& arguments) {
  Stack made;
  for (const IValue& value : arguments) {
    if (value.isDevice()) made.emplace_back(c10::Device(c10::kMeta));
    else if (value.isGenerator()) made.emplace_back();
    else made.push_back(mapped(value, on_meta));
  }
  Stack results = made;
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &results);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  for (const IValue& result : results)
    if (!result.isTensor() && !result.isTensorList()) return std::nullopt;
  for (IValue& result : results) made.push_back(std::move(result));
  return made;  // the arguments, which may have been resized, and the results
}

// Return the shapes of a call's arguments after it and of its results, as meta tensors; none if they depend on data.
// Many meta kernels are written in Python: what one has said is remembered.
std::optional<Stack> metas(const c10::OperatorHandle& op, const Stack& arguments) {
  static auto* known = new std::unordered_map<std::string, std::optional<Stack>>();
  static std::mutex mutex;
  const std::string key = signature(op, arguments);
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (auto found = known->find(key); found != known->end()) return found->second;
  }
  auto made = computed_metas(op, arguments);
  std::lock_guard<std::mutex> lock(mutex);
  return (*known)[key] = std::move(made);
}

// Run a kernel of the CPU where a stream runs.
void run(const c10::OperatorHandle& op, Stack& stack) {
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  at::NoGradGuard no_grad;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

void store(const Tensor& to, const Tensor& from, const std::string& name) {
  TORCH_CHECK(to.sizes() == from.sizes() && to.scalar_type() == from.scalar_type(), name, " returns ", from.sizes(), " ",
              from.scalar_type(), " and its meta kernel ", to.sizes(), " ", to.scalar_type());
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  to.copy_(from);
}

int device_in(const Stack& arguments) {
  int found = -1;
  for (const IValue& value : arguments) {
    if (value.isDevice() && found < 0) found = value.toDevice().has_index() ? value.toDevice().index() : current_device;
    each(value, [&](const Tensor& tensor) {
      if (is_late(tensor)) found = tensor.device().index();
    });
  }
  return found < 0 ? current_device : found;
}

// The operators that the host had to wait for.
std::mutex waits_mutex;
std::string waits;
void note_wait(const std::string& name) {
  std::lock_guard<std::mutex> lock(waits_mutex);
  waits += name + " ";
}

// Wait for everything, run, and put the results on the device: where shapes depend on data, or a result is a number.
void run_now(const c10::OperatorHandle& op, const Stack& arguments, Stack* stack, int device) {
  const auto& schema = op.schema();
  note_wait(schema.name());
  Stream& on = current(device);
  on.finish(on.submitted());
  fault().raise();
  Stack host;
  std::vector<std::pair<Tensor, Tensor>> written;
  for (size_t n = 0; n < arguments.size(); ++n) {
    if (arguments[n].isDevice()) host.emplace_back(c10::Device(c10::kCPU));
    else if (arguments[n].isGenerator()) host.emplace_back(drawn(arguments[n].toGenerator(), device));
    else
      host.push_back(mapped(arguments[n], [&](const Tensor& tensor) {
        if (!is_late(tensor)) return tensor;
        Tensor seen = on_host(tensor);
        if (!is_written(schema.arguments()[n])) return seen;
        written.emplace_back(tensor, seen.clone());
        return written.back().second;
      }));
  }
  std::exception_ptr error;
  on.finish(on.submit([&] {
    try {
      run(op, host);
    } catch (...) {
      error = std::current_exception();
    }
  }, true));
  if (error) std::rethrow_exception(error);
  auto on_device = [&](const Tensor& made) {
    for (auto& [tensor, copy] : written)
      if (copy.is_same(made)) return tensor;
    Tensor result = new_tensor(made.sizes(), made.strides(), made.scalar_type(), device);
    on.finish(on.submit([to = on_host(result), made] { to.copy_(made); }, false));
    return result;
  };
  for (auto& [tensor, copy] : written) {
    if (tensor.sizes() != copy.sizes()) resize(tensor, copy.sizes(), copy.strides());
    on.finish(on.submit([to = on_host(tensor), made = copy] { to.copy_(made); }, false));
  }
  for (const IValue& result : host) stack->push_back(mapped(result, on_device));
}

void queue(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const size_t num_arguments = schema.arguments().size();
  const Stack arguments = torch::jit::pop(*stack, num_arguments);
  const int device = device_in(arguments);
  OnDevice guard(device);
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  std::optional<Stack> shapes = metas(op, arguments);
  Stack host;
  bool writes_to_host = false;
  if (shapes) {
    for (size_t n = 0; n < num_arguments; ++n) {
      const bool written = is_written(schema.arguments()[n]);
      if (written) {  // resized, if the meta kernel did
        std::vector<Tensor> now;
        each((*shapes)[n], [&](const Tensor& meta) { now.push_back(meta); });
        size_t i = 0;
        each(arguments[n], [&](const Tensor& tensor) {
          writes_to_host = writes_to_host || !is_late(tensor);
          const Tensor& meta = now[i++];
          if (is_late(tensor) && tensor.sizes() != meta.sizes()) resize(tensor, meta.sizes(), meta.strides());
        });
      }
      if (arguments[n].isDevice()) host.emplace_back(c10::Device(c10::kCPU));
      else host.push_back(mapped(arguments[n], [](const Tensor& t) { return is_late(t) ? on_host(t) : kept(t); }));
    }
  }
  if (!shapes || writes_to_host) return run_now(op, arguments, stack, device);
  for (size_t n = 0; n < num_arguments; ++n) {
    const auto& type = schema.arguments()[n].type();
    const bool draws = type->kind() == c10::TypeKind::GeneratorType ||
        (type->kind() == c10::TypeKind::OptionalType &&
         type->castRaw<c10::OptionalType>()->getElementType()->kind() == c10::TypeKind::GeneratorType);
    if (draws)
      host[n] = drawn(arguments[n].isNone() ? std::nullopt : std::optional(arguments[n].toGenerator()), device);
  }
  std::vector<std::vector<Tensor>> results;  // by return; empty for one that is an argument
  for (size_t r = 0; r < schema.returns().size(); ++r) {
    const auto& returned = schema.returns()[r];
    const IValue& shape = (*shapes)[num_arguments + r];
    results.emplace_back();
    if (returned.alias_info()) {
      TORCH_CHECK(returned.alias_info()->isWrite(), schema.operator_name(), " is a view: the late device has no such");
      for (size_t n = 0; n < num_arguments; ++n) {
        const auto* alias = schema.arguments()[n].alias_info();
        if (alias && alias->beforeSets() == returned.alias_info()->beforeSets()) {
          stack->push_back(arguments[n]);
          break;
        }
      }
      continue;
    }
    stack->push_back(mapped(shape, [&](const Tensor& meta) {
      Tensor made = new_tensor(meta.sizes(), meta.strides(), meta.scalar_type(), device);
      results.back().push_back(on_host(made));
      return made;
    }));
  }
  current(device).submit(
      [op, host = std::move(host), results = std::move(results)]() mutable {
        run(op, host);
        for (size_t r = 0; r < results.size(); ++r) {
          size_t i = 0;
          if (!results[r].empty())
            each(host[r], [&](const Tensor& made) {
              store(results[r].at(i++), made, op.schema().name());
            });
        }
      },
      true);
}

c10::OperatorHandle found(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// torch passes convolutions to backends that it does not know under another name.
void convolution(const c10::OperatorHandle&, Stack* stack) {
  queue(found("aten::convolution"), stack);
}
void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  Stack given = torch::jit::pop(*stack, 10);  // gradient, input, weight, six settings, mask
  const int64_t num_outputs = given[0].toTensor().size(1);
  given.insert(given.begin() + 3, IValue(std::vector<int64_t>{num_outputs}));
  for (IValue& value : given) stack->push_back(std::move(value));
  queue(found("aten::convolution_backward"), stack);
}

// --- operators by hand ----------------------------------------------------------------------------------------------

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice guard(device && device->has_index() ? device->index() : current_device);
  return at::detail::empty_generic(size, &allocator(), kKeys, c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  return new_tensor(size, stride, c10::dtype_or_default(dtype),
                    device && device->has_index() ? device->index() : current_device);
}
const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  Tensor shape(at::detail::empty_strided_meta({0}, {1}, self.scalar_type()));
  shape.resize_(size, format);
  resize(self, shape.sizes(), shape.strides());
  return self;
}

// Copies. Page-locked memory may be copied later; other memory is copied now, as on CUDA.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  if (!to.numel()) return to;
  Stream& on = current(is_late(to) ? to.device().index() : from.device().index());
  if (is_late(from) && is_late(to)) {
    Stream& other = current(from.device().index());
    order(on, other, other.submitted());
    on.submit([a = on_host(to), b = on_host(from)] { a.copy_(b); }, true);
    order(other, on, on.submitted());  // else the source could be freed under the copy
    return to;
  }
  const Tensor& host = is_late(to) ? from : to;
  const bool later = non_blocking && Pinned::has(host.const_data_ptr());
  Tensor a = is_late(to) ? on_host(to) : to.detach(), b = is_late(from) ? on_host(from) : from.detach();
  if (is_late(to) && !later) b = b.clone();
  on.submit([a, b] { a.copy_(b); }, true);
  if (!later && (!non_blocking || is_late(from))) {
    note_wait("copy");
    on.finish(on.submitted());
    fault().raise();
  }
  return to;
}
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Scalar local_scalar_dense(const Tensor& self) {
  note_wait("item");
  Stream& on = current(self.device().index());
  on.finish(on.submitted());
  fault().raise();
  return at::_local_scalar_dense(on_host(self));
}
Tensor& set_(Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, allocator().allocate(0), &allocator(), true);
  return at::native::set_storage_cpu_(self, none, 0, {0}, {});
}
std::tuple<Tensor, Tensor> native_dropout(const Tensor& self, double p, std::optional<bool> train) {
  const int device = self.device().index();
  Tensor out = new_tensor(self.sizes(), self.strides(), self.scalar_type(), device);
  Tensor mask = new_tensor(self.sizes(), self.strides(), at::kBool, device);
  const bool drops = train.value_or(true);
  current(device).submit(
      [x = on_host(self), y = on_host(out), m = on_host(mask), p, drops,
       generator = drops ? drawn(std::nullopt, device) : at::Generator()] {
        c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
        if (!drops) {
          m.fill_(true), y.copy_(x);
          return;
        }
        m.bernoulli_(1 - p, generator);
        y.copy_(x * m * (p == 1 ? 0.0 : 1 / (1 - p)));
      },
      true);
  return {out, mask};
}
void record_stream(Tensor& self, c10::Stream on) {
  TORCH_CHECK_NOT_IMPLEMENTED(records_streams, "record_stream is not implemented for the late device");
  allocator().recordStream(self.storage().data_ptr(), on);
}
int64_t sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                   std::optional<double>, bool) {
  return int64_t(sdp::SDPBackend::math);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&queue>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_", set_);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("native_dropout", native_dropout);
  m.impl("record_stream", record_stream);
  m.impl("_fused_sdp_choice", sdp_choice);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&queue>());  // else torch divides it
}
TORCH_LIBRARY(late, m) {
  m.def("default_generator(int device) -> Generator?", [](int64_t device) { return default_generator(int(device)); });
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(FP32)
#define FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_SET_OPT_DTYPE)
}

}  // namespace late

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &late::sdp_choice)
}

// --- what tests set and ask -----------------------------------------------------------------------------------------

extern "C" {
void late_set_lag(int device, int stream, int64_t fixed, int64_t random, uint64_t seed) {
  late::stream(device, stream).set_lag(fixed, random, seed);
}
void late_hold(int device, int stream, int held) {
  late::stream(device, stream).set_held(held);
}
void late_records_streams(int whether) {
  late::records_streams = whether;
}
void late_poison_at_free(int whether) {
  late::poisons_at_free = whether;
}
int64_t late_peak_held(int device) {
  std::lock_guard<std::mutex> lock(late::pool(device).mutex);
  return late::pool(device).held.peak;
}
int64_t late_held(int device) {
  std::lock_guard<std::mutex> lock(late::pool(device).mutex);
  late::pool(device).reap();
  return late::pool(device).held.current;
}
const char* late_waits() {  // since it was last asked
  static std::string told;
  std::lock_guard<std::mutex> lock(late::waits_mutex);
  told = std::exchange(late::waits, "");
  return told.c_str();
}
int late_num_streams() {
  return late::kStreams;
}
}
