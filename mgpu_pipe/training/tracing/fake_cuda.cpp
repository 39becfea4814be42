// A CUDA device that does nothing, for a torch that was built without CUDA: fake tensors on cuda:0 need no more.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {

const Device only(DeviceType::CUDA, 0);
const Stream stream(Stream::DEFAULT, only);

struct PretendGuard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return only; }
  Device getDevice() const override { return only; }
  Stream getStream(Device) const noexcept override { return stream; }
  Stream getDefaultStream(Device) const override { return stream; }
  Stream getNewStream(Device, int) const override { return stream; }
  Stream exchangeStream(Stream) const noexcept override { return stream; }
};

struct PretendHooks final : CUDAHooksInterface {
  explicit PretendHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  int getNumGPUs() const override { return 1; }
};

C10_REGISTER_GUARD_IMPL(CUDA, PretendGuard)
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, PretendHooks)

} // namespace at
