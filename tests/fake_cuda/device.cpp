// CUDA devices for a build of torch without CUDA, whose memory and arithmetic are the CPU's.
//
// Tensors on cuda:0 to cuda:3 are torch's own: they have storages, dispatch keys and threads of autograd as on a GPU.
// Every operator is run by the CPU's kernel on aliases of its tensors, after a look at what a GPU would refuse: tensors
// of several devices, but 0-d ones, and random numbers of another device. Fresh memory is garbage. There are no
// streams: everything is done when a call returns.
//
// The library must be loaded before torch looks for CUDA (LD_PRELOAD); fake_cuda.py is its other half.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <map>
#include <set>

namespace {

using c10::Device, c10::DeviceIndex, c10::DispatchKey, c10::DispatchKeySet, c10::IValue, c10::Storage, c10::StorageImpl;
using c10::Stream;

constexpr int kDevices = 4;
thread_local int current = 0;

struct OnDevice {  // makes a device the current one for a while
    explicit OnDevice(int device) : before(current) { current = device; }
    ~OnDevice() { current = before; }
    int before;
};

struct DeviceMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t size) override {
        void* memory = size ? c10::alloc_cpu(size) : nullptr;
        if (memory) memset(memory, 0x7f, size);
        return {memory, memory, &c10::free_cpu, Device(c10::kCUDA, current)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
    void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
DeviceMemory device_memory;

struct Generator final : c10::GeneratorImpl {
    Generator(int device, at::Generator on_cpu)
        : GeneratorImpl(Device(c10::kCUDA, device), DispatchKeySet(DispatchKey::CUDA)), inner(std::move(on_cpu)) {}
    void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
    void set_offset(uint64_t offset) override { inner.unsafeGetGeneratorImpl()->set_offset(offset); }
    uint64_t get_offset() const override { return inner.unsafeGetGeneratorImpl()->get_offset(); }
    uint64_t current_seed() const override { return inner.current_seed(); }
    uint64_t seed() override { return inner.unsafeGetGeneratorImpl()->seed(); }
    void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        return inner.unsafeGetGeneratorImpl()->get_state();
    }
    GeneratorImpl* clone_impl() const override { return new Generator(device().index(), inner.clone()); }
    at::Generator inner;
};

at::Generator new_generator(int device) {
    return at::make_generator<Generator>(device < 0 ? current : device, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(int device) {
    static std::vector<at::Generator> all = [] {
        std::vector<at::Generator> made;
        for (int i = 0; i < kDevices; i++) made.push_back(new_generator(i));
        return made;
    }();
    return all[device < 0 ? current : device];
}

struct FakeHooks final : at::CUDAHooksInterface {
    FakeHooks(at::CUDAHooksArgs) {}
    void init() const override {}
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasCUDA() const override { return true; }
    bool hasCUDART() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
    at::Generator getNewGenerator(DeviceIndex device) const override { return new_generator(device); }
    bool isPinnedPtr(const void*) const override { return false; }
    at::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
    DeviceIndex current_device() const override { return current; }
    DeviceIndex deviceCount() const override { return kDevices; }
    int getNumGPUs() const override { return kDevices; }
    void setCurrentDevice(DeviceIndex device) const override { current = device; }
    DeviceIndex getCurrentDevice() const override { return current; }
    DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current, device); }
    DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
        return std::exchange(current, device < 0 ? current : device);
    }
    Device getDeviceFromPtr(void*) const override { return Device(c10::kCUDA, current); }
    void deviceSynchronize(DeviceIndex) const override {}
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return c10::kCUDA; }
    Device exchangeDevice(Device device) const override {
        return Device(c10::kCUDA, std::exchange(current, device.index()));
    }
    Device getDevice() const override { return Device(c10::kCUDA, current); }
    void setDevice(Device device) const override { current = device.index(); }
    void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
    Stream getStream(Device device) const override {
        return Stream(Stream::DEFAULT, Device(c10::kCUDA, device.index() < 0 ? current : device.index()));
    }
    Stream getDefaultStream(Device device) const override { return getStream(device); }
    Stream getStreamFromGlobalPool(Device device, bool = false) const override { return getStream(device); }
    Stream getNewStream(Device device, int) const override { return getStream(device); }
    Stream exchangeStream(Stream stream) const override { return getStream(stream.device()); }
    void* getStreamNativeHandle(const Stream) const override { return nullptr; }
    void destroyEvent(void*, const DeviceIndex) const noexcept override {}
    void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
    void block(void*, const Stream&) const override {}
    bool queryEvent(void*) const override { return true; }
    DeviceIndex deviceCount() const noexcept override { return kDevices; }
    bool queryStream(const Stream&) const override { return true; }
    void synchronizeStream(const Stream&) const override {}
    void synchronizeEvent(void*) const override {}
    void synchronizeDevice(const DeviceIndex) const override {}
    void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
    double elapsedTime(void*, void*, const DeviceIndex) const override { return 0; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// What an operator is given in place of tensors on a device: tensors on the CPU that have the same memory.
class Aliases {
  public:
    explicit Aliases(int device) : device_(device) {}

    at::Tensor of(const at::Tensor& original) {
        for (auto& pair : tensors_)
            if (pair.second.is_same(original)) return pair.first;
        auto alias = at::detail::make_tensor<c10::TensorImpl>(of(original.storage()), DispatchKeySet(DispatchKey::CPU),
                                                              original.dtype());
        auto* there = alias.unsafeGetTensorImpl();
        there->set_sizes_and_strides(original.sizes(), original.strides(), original.storage_offset());
        if (original.unsafeGetTensorImpl()->is_wrapped_number()) there->set_wrapped_number(true);
        tensors_.emplace_back(alias, original);
        return alias;
    }

    Storage of(const Storage& original) {
        auto* there = original.unsafeGetStorageImpl();
        auto known = of_original_.find(there);
        if (known != of_original_.end()) return known->second;
        c10::DataPtr memory(there->mutable_data_ptr().get(), Device(c10::kCPU));
        Storage alias(c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), original.nbytes(),
                                                       std::move(memory), c10::GetCPUAllocator(), true));
        enter(alias, original);
        return alias;
    }

    // What the operator has done to its arguments beside writing to them: other memory, another shape.
    void follow() {
        for (auto& [alias, pair] : of_alias_) {
            auto* original = pair.second.unsafeGetStorageImpl();
            if (alias->data() == original->data() && alias->nbytes() == original->nbytes()) continue;
            original->set_data_ptr_noswap(holding(pair.first, original->device()));
            original->set_nbytes(alias->nbytes());
        }
        for (auto& [alias, original] : tensors_) {
            auto *from = alias.unsafeGetTensorImpl(), *to = original.unsafeGetTensorImpl();
            auto expected = of_original_.at(original.storage().unsafeGetStorageImpl());
            if (from->storage().unsafeGetStorageImpl() != expected.unsafeGetStorageImpl())
                to->set_storage_keep_dtype(back(from->storage()));
            to->set_sizes_and_strides(from->sizes(), from->strides(), from->storage_offset());
        }
    }

    // The tensor on the device that has the memory of one that the operator gives.
    at::Tensor back(const at::Tensor& given) {
        if (!given.defined()) return given;
        for (auto& pair : tensors_)
            if (pair.first.is_same(given)) return pair.second;
        auto result = at::detail::make_tensor<c10::TensorImpl>(back(given.storage()), DispatchKeySet(DispatchKey::CUDA),
                                                               given.dtype());
        result.unsafeGetTensorImpl()->set_sizes_and_strides(given.sizes(), given.strides(), given.storage_offset());
        return result;
    }

  private:
    Storage back(const Storage& given) {
        auto known = of_alias_.find(given.unsafeGetStorageImpl());
        if (known != of_alias_.end()) return known->second.second;
        Storage original(c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), given.nbytes(),
                                                          holding(given, Device(c10::kCUDA, device_)), &device_memory,
                                                          true));
        enter(given, original);
        return original;
    }

    static c10::DataPtr holding(const Storage& storage, Device device) {  // its memory, as long as anybody has it
        auto* held = new Storage(storage);
        return {held->mutable_data(), held, [](void* context) { delete static_cast<Storage*>(context); }, device};
    }

    void enter(const Storage& alias, const Storage& original) {
        of_original_.emplace(original.unsafeGetStorageImpl(), alias);
        of_alias_.emplace(alias.unsafeGetStorageImpl(), std::make_pair(alias, original));
    }

    int device_;
    std::map<StorageImpl*, std::pair<Storage, Storage>> of_alias_;  // -> the alias, the original
    std::map<StorageImpl*, Storage> of_original_;
    std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;  // the alias, the original
};

// Calls visit(tensor) for each tensor of an argument, and puts what it returns in its place.
template <typename Visit>
void replace(IValue& value, Visit&& visit) {
    if (value.isTensor()) {
        value = visit(value.toTensor());
    } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(visit(tensor));
        value = list;
    } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
            list.push_back(tensor ? std::optional<at::Tensor>(visit(*tensor)) : tensor);
        value = list;
    }
}

bool is_here(const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

// The device of what an operator is given; an error where a GPU has one.
int device_of(const std::string& name, c10::ArrayRef<IValue> arguments) {
    static const std::set<std::string> takes_indices_from_cpu = {
        "aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put", "aten::index_put_", "aten::index_put.out",
        "aten::_index_put_impl_"};
    int device = -1;
    auto see = [&](const at::Tensor& tensor) {
        if (is_here(tensor)) {
            int index = tensor.device().index();
            TORCH_CHECK(device < 0 || device == index || tensor.dim() == 0, name, ": tensors on cuda:", device,
                        " and cuda:", index);
            device = device < 0 ? index : device;
        }
        return tensor;
    };
    auto see_cpu = [&](const at::Tensor& tensor) {
        bool is_fine = !tensor.defined() || tensor.is_cuda() || device < 0 || tensor.dim() == 0;
        TORCH_CHECK(is_fine || takes_indices_from_cpu.count(name), name, ": tensors on cuda:", device, " and cpu");
        return tensor;
    };
    for (IValue value : arguments) replace(value, see);
    for (IValue value : arguments) replace(value, see_cpu);
    for (const IValue& value : arguments) {
        if (value.isDevice() && value.toDevice().is_cuda() && value.toDevice().has_index() && device < 0)
            device = value.toDevice().index();
        if (!value.isGenerator() || !value.toGenerator().defined()) continue;
        Device of_numbers = value.toGenerator().device();
        TORCH_CHECK(of_numbers.is_cuda() && (device < 0 || of_numbers.index() == device), name,
                    ": random numbers of ", of_numbers, " on cuda:", device);
    }
    return device < 0 ? current : device;
}

void run_on_cpu(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
    const auto& schema = op.schema();
    const auto& overload = schema.operator_name().overload_name;
    const std::string name = overload.empty() ? schema.name() : schema.name() + "." + overload;
    Aliases aliases(device_of(name, torch::jit::last(*stack, schema.arguments().size())));
    for (size_t i = stack->size() - schema.arguments().size(); i < stack->size(); i++) {
        IValue& value = (*stack)[i];
        replace(value, [&](const at::Tensor& tensor) { return is_here(tensor) ? aliases.of(tensor) : tensor; });
        if (value.isDevice() && value.toDevice().is_cuda()) value = Device(c10::kCPU);
        if (value.isStorage() && value.toStorage().device().is_cuda()) value = aliases.of(value.toStorage());
        if (value.isGenerator() && value.toGenerator().defined() && value.toGenerator().device().is_cuda())
            value = static_cast<Generator*>(value.toGenerator().unsafeGetGeneratorImpl())->inner;
    }
    {
        at::AutoDispatchBelowADInplaceOrView guard;
        op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
    }
    aliases.follow();
    for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++)
        replace((*stack)[i], [&](const at::Tensor& tensor) { return aliases.back(tensor); });
}

// operators of memory itself ------------------------------------------------------------------------------------------

int index_of(std::optional<Device> device) { return device && device->has_index() ? device->index() : current; }

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    OnDevice guard(index_of(device));
    return at::detail::empty_generic(size, &device_memory, DispatchKeySet(DispatchKey::CUDA),
                                     c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
    OnDevice guard(index_of(device));
    return at::detail::empty_strided_generic(size, stride, &device_memory, DispatchKeySet(DispatchKey::CUDA),
                                             c10::dtype_or_default(dtype));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool) {
    Aliases aliases(is_here(self) ? self.device().index() : source.device().index());
    auto there = [&](const at::Tensor& tensor) { return is_here(tensor) ? aliases.of(tensor) : tensor; };
    at::AutoDispatchBelowADInplaceOrView guard;
    if (!self.is_same(source)) there(self).copy_(there(source));
    return self;
}

void record_stream(at::Tensor&, Stream) {}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
    auto* tensor = self.unsafeGetTensorImpl();
    auto* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
    const auto numel = c10::multiply_integers(size);
    const size_t bytes = (numel + tensor->storage_offset()) * tensor->dtype().itemsize();
    if (numel && storage->nbytes() < bytes) {
        OnDevice guard(self.device().index());
        auto memory = device_memory.allocate(bytes);
        if (storage->data()) memcpy(memory.get(), storage->data(), storage->nbytes());
        storage->set_data_ptr_noswap(std::move(memory));
        storage->set_nbytes(bytes);
    }
    tensor->set_sizes_contiguous(size);
    return self;
}

at::Tensor& set_strided(at::Tensor& self, Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
    TORCH_CHECK(source.device() == self.device(), "set_: ", source.device(), " for a tensor on ", self.device());
    auto* tensor = self.unsafeGetTensorImpl();
    tensor->set_storage_keep_dtype(source);
    if (stride.empty() && !size.empty()) {
        tensor->set_storage_offset(offset);
        tensor->set_sizes_contiguous(size);
    } else {
        tensor->set_sizes_and_strides(size, stride, offset);
    }
    return self;
}

at::Tensor& set_storage(at::Tensor& self, Storage source) {
    return set_strided(self, source, 0, {static_cast<int64_t>(source.nbytes() / self.dtype().itemsize())}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
    return set_strided(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_empty(at::Tensor& self) {
    auto nothing = empty({0}, c10::typeMetaToScalarType(self.dtype()), {}, self.device(), {}, {});
    return set_strided(self, nothing.storage(), 0, {0}, {1});
}

}  // namespace

namespace at {
using FakeHooksOfCUDA = ::FakeHooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, FakeHooksOfCUDA)
}  // namespace at

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
    m.impl("empty.memory_format", TORCH_FN(empty));
    m.impl("empty_strided", TORCH_FN(empty_strided));
    m.impl("copy_", TORCH_FN(copy_));
    m.impl("record_stream", TORCH_FN(record_stream));
    m.impl("resize_", TORCH_FN(resize_));
    m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_strided));
    m.impl("set_.source_Storage", TORCH_FN(set_storage));
    m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
    m.impl("set_", TORCH_FN(set_empty));
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.attr("devices") = kDevices;
    m.def("current", [] { return current; });
    m.def("set_current", [](int device) { current = device; });
    m.def("default_generator", &default_generator, py::return_value_policy::copy);
}
