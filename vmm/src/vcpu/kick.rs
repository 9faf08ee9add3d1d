//! Getting a vCPU thread out of the guest without ever losing the request.
//!
//! A signal alone is lost when it arrives just before `KVM_RUN`. So its handler sets `immediate_exit` in the
//! run page of the vCPU whose thread it interrupts: either the thread is in `KVM_RUN` and comes out of it, or its
//! next `KVM_RUN` returns at once (Linux `Documentation/virt/kvm/api.rst`, "immediate_exit").
#![allow(unsafe_code)] // The handler reaches the run page through a pointer of its thread.

use std::cell::Cell;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use kvm_bindings::kvm_run;
use kvm_ioctls::VcpuFd;
use vmm_sys_util::errno;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

thread_local! {
    /// The run page's `immediate_exit` of the vCPU that this thread runs; null in all other threads.
    static FLAG: Cell<*const AtomicU8> = const { Cell::new(ptr::null()) };
}

/// The signal that kicks: the first that no C library keeps for itself.
pub(super) fn signal() -> i32 {
    SIGRTMIN()
}

/// Installs the handler, once a process.
pub(super) fn install() -> Result<(), errno::Error> {
    static INSTALLED: OnceLock<Result<(), errno::Error>> = OnceLock::new();
    *INSTALLED.get_or_init(|| register_signal_handler(signal(), handle))
}

extern "C" fn handle(_: std::ffi::c_int, _: *mut libc::siginfo_t, _: *mut std::ffi::c_void) {
    let flag = FLAG.get();
    if !flag.is_null() {
        // SAFETY: not null only between `enter` and the drop of its guard, in this very thread, while the
        // run page is mapped.
        unsafe { (*flag).store(1, Ordering::Relaxed) };
    }
}

/// While it lives, kicks of this thread reach the vCPU's run page.
pub(super) struct Entered {
    flag: *const AtomicU8,
}

impl Entered {
    /// Marks this thread as the one that runs `vcpu`, which must outlive the guard.
    pub(super) fn new(vcpu: &mut VcpuFd) -> Self {
        let page: *mut kvm_run = vcpu.get_kvm_run();
        // SAFETY: a place within the live run page; no reference is made.
        let flag = unsafe { ptr::addr_of_mut!((*page).immediate_exit) }.cast::<AtomicU8>();
        FLAG.set(flag);
        Self { flag }
    }

    /// Takes a kick back, before the next `KVM_RUN` that shall run.
    pub(super) fn clear(&self) {
        // SAFETY: the run page outlives this guard; the kernel and the handler access the byte as a whole.
        unsafe { (*self.flag).store(0, Ordering::Relaxed) };
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        FLAG.set(ptr::null());
    }
}
