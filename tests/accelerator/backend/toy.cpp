// The toy accelerator: two devices whose memory is host memory, so that code for accelerators can be tested.
//
// - Memory is counted, and ends at a capacity.
// - Copies between pinned memory and a device, with non_blocking=True, wait on their stream until something
//   waits for them: as late as can be.
// - Everything else is computed by the CPU's kernels, at once, in the order of the current stream.
// - A vector clock per stream says which operations it comes after. An operation that touches memory another
//   stream uses, without coming after that use, fails by name. So does freeing memory under such a use.
//
// It is no GPU: it has no kernels of its own, and nothing it computes runs beside the host.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto kToy = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;
constexpr DeviceIndex kPinned = -1;  // the "device" of pinned host memory
constexpr unsigned char kUnwritten = 0xEE;  // fills a host buffer until the copy into it has run

using StreamKey = int64_t;  // device << 32 | stream id
using Clock = std::map<StreamKey, uint64_t>;

struct Operation {
  std::function<void()> run;
};

struct StreamState {
  uint64_t issued = 0;
  uint64_t done = 0;
  std::deque<Operation> waiting;
  Clock after;  // what its next operation comes after
};

struct Event {
  bool recorded = false;
  StreamKey stream = 0;
  uint64_t place = 0;
  Clock after;
};

// A stretch of memory, and what one operation of a stream does with it.
struct Use {
  StreamKey stream;
  uint64_t place;
  const char* begin;
  const char* end;
  bool writes;
};

struct Block {
  char* data;
  size_t bytes;
  DeviceIndex device;
  StreamKey owner;  // the stream it was allocated on
  std::vector<Use> uses;
  std::set<StreamKey> recorded;
};

// Never held while a tensor that Python knows is copied, dropped or computed with: that may need Python's own
// lock, whose holder may be waiting for this one to free a tensor.
std::recursive_mutex mutex;
std::map<StreamKey, StreamState> streams;
std::map<const char*, Block> blocks;
std::vector<Block> limbo;  // freed, but a stream has yet to use them
Clock host;  // what the host has waited for
std::string fault;  // found where nothing can be raised
c10::CachingDeviceAllocator::DeviceStats stats[kDevices];
at::Tensor random_states[kDevices];
int64_t streams_made, events_recorded, copies_queued, operations_run;
bool used, forked;
thread_local DeviceIndex current_device = 0;
thread_local c10::StreamId current_streams[kDevices] = {};
thread_local bool inside_fallback = false;

using Lock = std::lock_guard<std::recursive_mutex>;

size_t capacity() {
  const char* told = std::getenv("TOY_MEMORY_BYTES");
  return told ? std::strtoull(told, nullptr, 10) : size_t(2) << 30;
}

StreamKey key_of(const Stream& stream) { return (int64_t(stream.device_index()) << 32) | stream.id(); }

StreamKey current_key(DeviceIndex device) { return (int64_t(device) << 32) | current_streams[device]; }

void use_device() {
  TORCH_CHECK(!forked, "the toy accelerator was used before this process was forked; start a new process");
  if (!used) {
    used = true;
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
  }
}

void join(Clock& clock, const Clock& other) {
  for (auto [stream, place] : other) clock[stream] = std::max(clock[stream], place);
}

bool has_run(const Use& use) { return streams[use.stream].done >= use.place; }

bool comes_after(StreamKey stream, const Use& use) {
  if (use.stream == stream) return true;
  auto& after = streams[stream].after;
  return after[use.stream] >= use.place || host[use.stream] >= use.place;
}

std::string name_of(StreamKey key) {
  return c10::str("stream ", key & 0xFFFFFFFF, " of toy:", key >> 32);
}

Block* block_of(const void* data) {
  auto next = blocks.upper_bound(static_cast<const char*>(data));
  if (next == blocks.begin()) return nullptr;
  Block& block = std::prev(next)->second;
  return data < block.data + block.bytes ? &block : nullptr;
}

std::string memory_name(const Block& block) {
  return c10::str(block.device == kPinned ? "pinned" : "device", " memory of ", block.bytes, " bytes");
}

void free_limbo() {
  auto kept = std::remove_if(limbo.begin(), limbo.end(), [](const Block& block) {
    bool over = std::all_of(block.uses.begin(), block.uses.end(), has_run);
    if (!over) return false;
    if (block.device != kPinned) {
      stats[block.device].allocated_bytes[0].decrease(block.bytes);
      stats[block.device].reserved_bytes[0].decrease(block.bytes);
    }
    std::free(block.data);
    return true;
  });
  limbo.erase(kept, limbo.end());
}

void raise_fault() {
  std::string found;
  std::swap(found, fault);
  TORCH_CHECK(found.empty(), found);
}

// Runs a stream's waiting operations up to a place; those that wait for other streams run these first.
void run_to(StreamKey key, uint64_t place) {
  auto& stream = streams[key];
  while (stream.done < place && !stream.waiting.empty()) {
    Operation operation = std::move(stream.waiting.front());
    stream.waiting.pop_front();
    operation.run();
    ++stream.done;
  }
  free_limbo();
}

uint64_t issue(StreamKey key, std::function<void()> run) {
  auto& stream = streams[key];
  stream.waiting.push_back({std::move(run)});
  stream.after[key] = ++stream.issued;
  join(stream.after, host);
  return stream.issued;
}

// Notes that the stream's next operation uses that memory. Fails if it does not come after earlier uses.
void touch(StreamKey key, const char* begin, const char* end, bool writes, const std::string& what) {
  Block* block = block_of(begin);
  if (block == nullptr) return;
  for (const Use& use : block->uses) {
    bool conflicts = use.begin < end && begin < use.end && (writes || use.writes);
    TORCH_CHECK(!conflicts || comes_after(key, use), "toy accelerator: ", what, " on ", name_of(key),
        writes ? " writes " : " reads ", end - begin, " bytes of ", memory_name(*block), " that ",
        name_of(use.stream), use.writes ? " writes" : " reads",
        ", and does not come after that; wait for its event first");
  }
  // Forgotten: what this use comes after and replaces, and what everybody comes after.
  std::erase_if(block->uses, [&](const Use& use) {
    bool covered = begin <= use.begin && use.end <= end && (writes || (use.stream == key && !use.writes));
    return covered || host[use.stream] >= use.place;
  });
  block->uses.push_back({key, streams[key].issued + 1, begin, end, writes});
}

void host_waited(const Clock& after) {
  join(host, after);
  raise_fault();
}

// ---- memory

void allocate_block(char* data, size_t bytes, DeviceIndex device) {
  blocks[data] = {data, bytes, device, device == kPinned ? -1 : current_key(device), {}, {}};
}

void free_block(void* data) {
  if (data == nullptr) return;
  Lock lock(mutex);
  auto found = blocks.find(static_cast<char*>(data));
  Block block = std::move(found->second);
  blocks.erase(found);
  for (const Use& use : block.uses) {
    bool safe = block.device == kPinned || block.recorded.count(use.stream) || comes_after(block.owner, use);
    if (!safe)
      fault = c10::str("toy accelerator: ", memory_name(block), " was freed while ", name_of(use.stream),
          " still uses it; record_stream() is missing");
  }
  limbo.push_back(std::move(block));
  free_limbo();
}

struct ToyAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    Lock lock(mutex);
    use_device();
    auto& counted = stats[current_device];
    if (bytes == 0) return {nullptr, nullptr, &free_block, Device(kToy, current_device)};
    size_t taken = counted.allocated_bytes[0].current;
    if (taken + bytes > capacity()) {
      ++counted.num_ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "toy accelerator out of memory: tried to allocate ", bytes,
          " bytes; ", taken, " of ", capacity(), " are allocated");
    }
    char* data = static_cast<char*>(std::malloc(bytes));
    counted.allocated_bytes[0].increase(bytes);
    counted.reserved_bytes[0].increase(bytes);
    allocate_block(data, bytes, current_device);
    return {data, data, &free_block, Device(kToy, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return used; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, Stream stream) override {
    Lock lock(mutex);
    if (Block* block = block_of(data.get())) block->recorded.insert(key_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    Lock lock(mutex);
    return stats[device];
  }
  void resetAccumulatedStats(DeviceIndex device) override { stats[device].allocated_bytes[0].reset_accumulated(); }
  void resetPeakStats(DeviceIndex device) override {
    stats[device].allocated_bytes[0].reset_peak();
    stats[device].reserved_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    Lock lock(mutex);
    use_device();
    return {capacity() - stats[device].allocated_bytes[0].current, capacity()};
  }
} allocator;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Lock lock(mutex);
    use_device();
    char* data = static_cast<char*>(std::malloc(std::max<size_t>(bytes, 1)));
    allocate_block(data, std::max<size_t>(bytes, 1), kPinned);
    return {data, data, &free_block, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} pinned_allocator;

// ---- devices, streams and events

struct ToyGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kToy; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(kToy, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "toy:", int(device.index()), " is not there: there are ", int(kDevices));
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  DeviceIndex index(Device device) const { return device.has_index() ? device.index() : current_device; }
  Stream getStream(Device device) const override {
    return Stream(Stream::UNSAFE, Device(kToy, index(device)), current_streams[index(device)]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::UNSAFE, Device(kToy, index(device)), 0);
  }
  Stream getNewStream(Device device, int) const override {
    Lock lock(mutex);
    use_device();
    return Stream(Stream::UNSAFE, Device(kToy, index(device)), ++streams_made);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    Lock lock(mutex);
    if (*event == nullptr) *event = new Event;
    auto& state = streams[key_of(stream)];
    *static_cast<Event*>(*event) = {true, key_of(stream), state.issued, state.after};
    ++events_recorded;
  }
  void block(void* event, const Stream& stream) const override {
    Lock lock(mutex);
    if (event == nullptr) return;
    Event waited = *static_cast<Event*>(event);
    join(streams[key_of(stream)].after, waited.after);
    issue(key_of(stream), [waited] { run_to(waited.stream, waited.place); });
  }
  bool queryEvent(void* event) const override { return event == nullptr || query(*static_cast<Event*>(event)); }
  void synchronizeEvent(void* event) const override {
    Lock lock(mutex);
    if (event == nullptr) return;
    Event waited = *static_cast<Event*>(event);
    run_to(waited.stream, waited.place);
    host_waited(waited.after);
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryStream(const Stream& stream) const override {
    Lock lock(mutex);
    auto& state = streams[key_of(stream)];
    return query({true, key_of(stream), state.issued, state.after});
  }
  void synchronizeStream(const Stream& stream) const override {
    Lock lock(mutex);
    auto& state = streams[key_of(stream)];
    run_to(key_of(stream), state.issued);
    host_waited(state.after);
  }
  void synchronizeDevice(DeviceIndex device) const override {
    Lock lock(mutex);
    for (auto& [key, state] : streams)
      if (key >> 32 == device) {
        run_to(key, state.issued);
        join(host, state.after);
      }
    raise_fault();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    allocator.recordStream(data, stream);
  }

 private:
  // Time passes only while somebody asks: each question finds one more operation run.
  static bool query(const Event& event) {
    Lock lock(mutex);
    auto& stream = streams[event.stream];
    if (stream.done >= event.place) {
      join(host, event.after);
      return true;
    }
    run_to(event.stream, stream.done + 1);
    return false;
  }
};

struct ToyHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return used; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { ToyGuard().setDevice(Device(kToy, device)); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return ToyGuard().exchangeDevice(Device(kToy, device)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override {
    Lock lock(mutex);
    Block* block = block_of(data);
    return block != nullptr && block->device == kPinned;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Device getDeviceFromPtr(void* data) const override {
    Lock lock(mutex);
    Block* block = block_of(data);
    return Device(kToy, block ? block->device : 0);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DataPtr grown = allocator.allocate(bytes);
    std::memcpy(grown.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(grown));
    storage.set_nbytes(bytes);
  }
};

// ---- operators

DeviceIndex index_of(std::optional<Device> device) {
  return device.has_value() && device->has_index() ? device->index() : current_device;
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(Device(kToy, index_of(device)));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(Device(kToy, index_of(device)));
  return at::detail::empty_strided_generic(size, stride, &allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(size);
  size_t bytes = at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(), self.storage_offset());
  if (self.numel() > 0 && bytes > self.storage().nbytes()) {
    c10::OptionalDeviceGuard guard(self.device());
    ToyHooks().resizePrivateUse1Bytes(self.storage(), bytes);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
    at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  int64_t count = storage.nbytes() / self.dtype().itemsize();
  return set_storage(self, std::move(storage), 0, {count}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// From a tensor's first byte to behind its last one, whatever its strides.
std::pair<const char*, const char*> stretch_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {nullptr, nullptr};
  const char* begin = static_cast<const char*>(tensor.data_ptr());
  return {begin, begin + at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize())};
}

// The same memory as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
}

void queue_copy(const at::Tensor& from, const at::Tensor& to, const at::Tensor& source, const at::Tensor& target,
    bool non_blocking) {
  Lock lock(mutex);
  raise_fault();
  use_device();
  const at::Tensor& there = source.is_cpu() ? target : source;
  const at::Tensor& here = source.is_cpu() ? source : target;
  StreamKey stream = current_key(there.device().index());
  auto [from_begin, from_end] = stretch_of(from);
  auto [to_begin, to_end] = stretch_of(to);
  touch(stream, from_begin, from_end, false, "a copy");
  touch(stream, to_begin, to_end, true, "a copy");
  bool waits = non_blocking && here.is_cpu() && ToyHooks().isPinnedPtr(here.data_ptr());
  if (waits && target.is_cpu() && to.is_contiguous()) std::memset(to.data_ptr(), kUnwritten, to.nbytes());
  uint64_t place = issue(stream, [from, to] { to.copy_(from); });
  if (waits) {
    ++copies_queued;
    return;
  }
  run_to(stream, place);
  if (here.is_cpu()) host_waited(streams[stream].after);
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (source.numel() == 0) return target;
  at::Tensor from = on_host(source), to = on_host(target);
  if (inside_fallback)
    to.copy_(from);
  else
    queue_copy(from, to, source, target, non_blocking);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) const_cast<at::Tensor&>(target).resize_(source.sizes());
  return copy_from(source, target, false);
}

void record_stream(at::Tensor& self, Stream stream) { allocator.recordStream(self.storage().data_ptr(), stream); }

struct Argument {
  std::pair<const char*, const char*> stretch;
  DeviceIndex device;
  bool writes;
};

// The device's memory among an operator's arguments. Call it without the lock.
std::vector<Argument> device_arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  std::vector<Argument> found;
  const auto& arguments = op.schema().arguments();
  size_t begin = stack.size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = stack[begin + i];
    bool writes = arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite();
    auto add = [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.device().type() == kToy)
        found.push_back({stretch_of(tensor), tensor.device().index(), writes});
    };
    if (value.isTensor()) add(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) add(tensor);
    if (value.isOptionalTensorList())
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        if (tensor.has_value()) add(*tensor);
  }
  return found;
}

struct Inside {
  bool before = inside_fallback;
  Inside() { inside_fallback = true; }
  ~Inside() { inside_fallback = before; }
};

// Lends the device's random numbers to the CPU's generator, from which the CPU's kernels draw.
struct Lent {
  DeviceIndex device;
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  at::Tensor own = generator.get_state();
  explicit Lent(DeviceIndex index) : device(index) { generator.set_state(random_states[device]); }
  ~Lent() {
    random_states[device] = generator.get_state();
    generator.set_state(own);
  }
};

// Any operator without a kernel above.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::vector<Argument> arguments = device_arguments(op, *stack);
  DeviceIndex device = arguments.empty() ? current_device : arguments.back().device;
  if (!inside_fallback) {
    Lock lock(mutex);
    raise_fault();
    use_device();
    ++operations_run;
    StreamKey stream = current_key(device);
    for (const Argument& argument : arguments)
      if (auto [begin, end] = argument.stretch; begin != nullptr)
        touch(stream, begin, end, argument.writes, op.schema().name());
    run_to(stream, issue(stream, [] {}));
  }
  Inside inside;
  c10::OptionalDeviceGuard guard(Device(kToy, device));
  std::optional<Lent> lent;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) lent.emplace(device);
  at::native::cpu_fallback(op, stack);
}

void manual_seed(int64_t device, int64_t seed) {
  Lock lock(mutex);
  at::Generator generator = at::detail::createCPUGenerator(seed);
  random_states[device] = generator.get_state();
}

at::Tensor get_rng_state(int64_t device) { return random_states[device].clone(); }

void set_rng_state(int64_t device, const at::Tensor& state) { random_states[device] = state.clone(); }

std::vector<int64_t> counts() { return {streams_made, events_recorded, copies_queued, operations_run}; }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("record_stream", &record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY(toy, m) {
  m.def("manual_seed(int device, int seed) -> ()", &manual_seed);
  m.def("get_rng_state(int device) -> Tensor", &get_rng_state);
  m.def("set_rng_state(int device, Tensor state) -> ()", [](int64_t device, at::Tensor state) { set_rng_state(device, state); });
  m.def("counts() -> int[]", &counts);
  m.def("is_in_bad_fork() -> bool", []() { return forked; });
  m.def("is_used() -> bool", []() { return used; });
}

ToyHooks hooks;

struct Registration {
  Registration() {
    c10::SetAllocator(kToy, &allocator);
    at::RegisterPrivateUse1HooksInterface(&hooks);
    for (DeviceIndex device = 0; device < kDevices; ++device) manual_seed(device, 0);
  }
} registration;

C10_REGISTER_GUARD_IMPL(PrivateUse1, ToyGuard);

}  // namespace
