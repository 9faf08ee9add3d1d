//! What `kvm_ioctls` leaves out of an exit: the width of a port access and the words of an internal error.
#![allow(unsafe_code)] // Fields of the run page's union, and the bytes of a port access in that page.

use kvm_ioctls::VcpuFd;

/// A port access that the guest has just left for.
pub(super) struct PortAccess<'a> {
    pub(super) port: u16,
    /// Bytes of one value; a repeated access has several.
    pub(super) width: usize,
    /// All bytes: written by the guest, or to be filled in.
    pub(super) data: &'a mut [u8],
}

/// The port access of `vcpu`, whose last exit was `KVM_EXIT_IO`.
pub(super) fn port_access(vcpu: &mut VcpuFd) -> PortAccess<'_> {
    let run = vcpu.get_kvm_run();
    // SAFETY: plain integers, valid whatever the kernel last wrote into the union.
    let io = unsafe { run.__bindgen_anon_1.io };
    let width = usize::from(io.size);
    let length = io.count as usize * width;
    let page = std::ptr::from_mut(run).cast::<u8>();
    // SAFETY: for this exit the kernel puts the bytes at `data_offset` into the mapping that `run` starts
    // (api.rst, KVM_EXIT_IO); it is mapped for as long as `vcpu`, which stays borrowed.
    let data = unsafe { std::slice::from_raw_parts_mut(page.add(io.data_offset as usize), length) };
    PortAccess {
        port: io.port,
        width,
        data,
    }
}

/// What KVM says of an internal error: its kind and its words (api.rst, `KVM_EXIT_INTERNAL_ERROR`).
pub(super) fn internal_error(vcpu: &mut VcpuFd) -> (u32, Vec<u64>) {
    // SAFETY: plain integers, valid whatever the kernel last wrote into the union.
    let internal = unsafe { vcpu.get_kvm_run().__bindgen_anon_1.internal };
    let count = (internal.ndata as usize).min(internal.data.len());
    (internal.suberror, internal.data[..count].to_vec())
}
