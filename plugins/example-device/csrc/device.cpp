// A device in host memory, registered as torch's PrivateUse1 backend. Its memory is limited and counted to the byte. As
// on hardware, tensors of the host and of other such devices raise errors.
//
// torch decomposes most operations into a few that write into a given tensor. The fallback of these, `run_on_host`, calls
// the host's kernel on views of the device's memory and moves new results to the device.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

struct Memory {
  size_t limit = 0, used = 0, peak = 0;
};
struct Block {
  void* data;
  size_t bytes;
  c10::DeviceIndex device;
};

std::mutex mutex;                    // guards `memories`
std::vector<Memory> memories;        // one per device; empty until `open`
thread_local c10::DeviceIndex current = 0;

Memory& memory_of(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && size_t(device) < memories.size(), "example:", int(device), ": there are ", memories.size(),
              " devices");
  return memories[device];
}

struct Allocator final : c10::Allocator {
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    std::lock_guard<std::mutex> lock(mutex);
    memories[block->device].used -= block->bytes;
    std::free(block->data);
    delete block;
  }
  c10::DataPtr allocate(size_t bytes) override {
    std::lock_guard<std::mutex> lock(mutex);
    Memory& memory = memory_of(current);
    const size_t free = memory.limit - std::min(memory.used, memory.limit);
    TORCH_CHECK_WITH(OutOfMemoryError, bytes <= free, "out of memory on example:", int(current), ": ", bytes,
                     " bytes were asked for, ", free, " of ", memory.limit, " are free");
    void* data = nullptr;
    TORCH_CHECK_WITH(OutOfMemoryError, posix_memalign(&data, 64, std::max<size_t>(bytes, 64)) == 0,
                     "the host has no memory left for example:", int(current));
    memory.peak = std::max(memory.peak, memory.used += bytes);
    return {data, new Block{data, bytes, current}, &release, c10::Device(kType, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} allocator;
REGISTER_ALLOCATOR(kType, &allocator);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device getDevice() const override { return {kType, current}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(memories.size()); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return !memories.empty(); }
  bool isAvailable() const override { return !memories.empty(); }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(memories.size()); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    const c10::Device device = impl->device();
    const c10::DeviceGuard guard(device);  // the device that allocates
    if (bytes != 0) return at::native::resize_bytes_cpu(impl, bytes);
    impl->set_data_ptr_noswap(c10::DataPtr(nullptr, device));
    impl->set_nbytes(0);
  }
};
const bool registered = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor on_host(const at::Tensor& tensor) {  // a host tensor that shares the memory
  if (tensor.device().type() != kType) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  on_host(target).copy_(on_host(source));
  return target;
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());  // the device that allocates
  return at::native::resize_(self, size, format);
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  resize_(target, source.sizes(), std::nullopt);
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) { return on_host(tensor).item(); }

at::Tensor& set_source(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), size, stride.empty() ? std::nullopt : std::optional<at::IntArrayRef>(stride));
  return self;
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t num_arguments = schema.arguments().size(), base = stack->size() - num_arguments;
  const std::vector<c10::IValue> given(stack->begin() + base, stack->end());
  std::optional<c10::Device> device;
  const auto borrow = [&](const at::Tensor& tensor, bool written) {
    if (!tensor.defined()) return tensor;
    TORCH_CHECK(tensor.device().type() == kType || tensor.dim() == 0, op.operator_name(), ": a tensor of ",
                tensor.device(), " among tensors of a device");
    if (tensor.device().type() != kType) return tensor;
    TORCH_CHECK(!device || *device == tensor.device(), op.operator_name(), ": tensors of ", *device, " and of ",
                tensor.device());
    device = tensor.device();
    // An empty tensor may be a result that the operation resizes.
    return written && tensor.numel() == 0 ? at::empty(tensor.sizes(), tensor.options().device(at::kCPU)) : on_host(tensor);
  };
  for (size_t i = 0; i < num_arguments; ++i) {
    auto& value = (*stack)[base + i];
    const auto* alias = schema.arguments()[i].alias_info();
    const bool written = alias && alias->isWrite();
    if (value.isTensor()) {
      value = borrow(value.toTensor(), written);
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& tensor : tensors) tensor = borrow(tensor, written);
      value = tensors;
    } else if (value.isOptionalTensorList()) {
      auto tensors = value.toOptionalTensorList().copy();
      for (size_t j = 0; j < tensors.size(); ++j)
        if (const std::optional<at::Tensor> tensor = tensors.get(j)) tensors.set(j, borrow(*tensor, written));
      value = tensors;
    } else if (value.isDevice()) {
      value = c10::Device(at::kCPU);
    }
  }
  const std::vector<c10::IValue> lent(stack->begin() + base, stack->end());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (size_t i = 0; i < num_arguments; ++i)  // results that the operation has resized
    if (given[i].isTensor() && given[i].toTensor().defined() && given[i].toTensor().sizes() != lent[i].toTensor().sizes())
      copy_from_and_resize(lent[i].toTensor(), given[i].toTensor());
  const auto target = device.value_or(c10::Device(kType, current));
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    auto& value = (*stack)[stack->size() - schema.returns().size() + i];
    if (const auto* alias = schema.returns()[i].alias_info()) {
      TORCH_CHECK(alias->isWrite(), op.operator_name(), " gives a view and has no kernel of this device");
      for (size_t j = 0; j < num_arguments; ++j)
        if (const auto* other = schema.arguments()[j].alias_info(); other && *other == *alias) value = given[j];
    } else if (value.isTensor() && value.toTensor().defined()) {
      value = value.toTensor().to(target);
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& tensor : tensors) tensor = tensor.to(target);
      value = tensors;
    }
  }
}

void open(int64_t devices, int64_t limit) {
  std::lock_guard<std::mutex> lock(mutex);
  if (memories.empty()) memories.resize(devices);
  for (auto& memory : memories) memory.limit = limit;
}

std::vector<int64_t> memory(int64_t device) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto& found = memory_of(c10::DeviceIndex(device));
  return {int64_t(found.limit), int64_t(found.used), int64_t(found.peak)};
}

void reset_peak(int64_t device) {
  std::lock_guard<std::mutex> lock(mutex);
  memory_of(c10::DeviceIndex(device)).peak = memory_of(c10::DeviceIndex(device)).used;
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  auto result = at::empty_like(x, x.options(), at::MemoryFormat::Contiguous);
  const auto wide = on_host(x).to(at::kFloat);
  const auto normed = wide * at::rsqrt(wide.pow(2).mean(-1, true) + eps);
  on_host(result).copy_(on_host(weight) * normed.to(x.scalar_type()));
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("set_.source_Storage_storage_offset", &set_source);
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("resize_", &resize_);
  library.impl("unfold", TORCH_FN(at::native::unfold));
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY(mvllm_example_device, library) {
  library.def("open(int devices, int limit) -> ()", &open);
  library.def("memory(int device) -> int[]", &memory);
  library.def("reset_peak(int device) -> ()", &reset_peak);
  library.def("built_with() -> str", []() { return std::string(TORCH_VERSION); });
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
}
TORCH_LIBRARY_IMPL(mvllm_example_device, PrivateUse1, library) { library.impl("rms_norm", &rms_norm); }
