//! System calls past the C library, for a child that shares its parent's thread-local storage: nothing here sets errno.
// The kernel's own calling convention, and the few calls that no library offers without errno.
#![allow(unsafe_code)]

use std::arch::asm;
use std::ffi::CStr;
use std::ptr;

use rustix::io::Errno;

/// `struct kernel_sigaction`: handler, flags, restorer, mask. All zero is the default action.
type Action = [u64; 4];

/// The kernel's mask has a bit for each of 64 signals.
const MASK_BYTES: usize = 8;

/// A result that may be an error: minus its number.
///
/// # Errors
/// The error.
pub(super) fn checked(result: i64) -> Result<i64, Errno> {
    if result >= 0 {
        return Ok(result);
    }
    let errno = i32::try_from(-result).unwrap_or(libc::EINVAL);
    Err(Errno::from_raw_os_error(errno))
}

/// Whether this process ignores a signal.
pub(super) fn is_ignored(signal: i32) -> bool {
    let mut now: Action = [0; 4];
    let none = ptr::null::<Action>() as usize;
    // SAFETY: changes nothing, and writes an action with a mask of the size given.
    let result = unsafe {
        call(
            libc::SYS_rt_sigaction,
            [signal as usize, none, &raw mut now as usize, MASK_BYTES],
        )
    };
    result == 0 && now[0] == libc::SIG_IGN as u64
}

/// Gives a signal its default action. No number is wrong: one that has no such action keeps its own.
pub(super) fn reset_signal(signal: i32) {
    let default: Action = [0; 4];
    // SAFETY: reads an action with a mask of the size given; no handler can be called any more.
    unsafe {
        call(
            libc::SYS_rt_sigaction,
            [signal as usize, &raw const default as usize, 0, MASK_BYTES],
        )
    };
}

/// Blocks no signal.
pub(super) fn unblock_signals() {
    let empty = 0u64;
    // SAFETY: reads a mask of the size given.
    unsafe {
        call(
            libc::SYS_rt_sigprocmask,
            [
                libc::SIG_SETMASK as usize,
                &raw const empty as usize,
                0,
                MASK_BYTES,
            ],
        )
    };
}

/// Marks every descriptor from `first` on as close-on-exec.
///
/// # Errors
/// What the kernel says.
pub(super) fn close_on_exec_from(first: u32) -> Result<(), Errno> {
    let flag = libc::CLOSE_RANGE_CLOEXEC as usize;
    // SAFETY: none is closed under a borrow.
    let result = unsafe {
        call(
            libc::SYS_close_range,
            [first as usize, u32::MAX as usize, flag, 0],
        )
    };
    checked(result).map(|_| ())
}

/// Becomes another program; returns only with the reason why not.
///
/// # Safety
/// The arrays end with a null pointer and point to strings that end with a zero byte.
pub(super) unsafe fn execve(
    program: &CStr,
    argv: *const *const u8,
    env: *const *const u8,
) -> Errno {
    // SAFETY: the caller's.
    let result = unsafe {
        call(
            libc::SYS_execve,
            [program.as_ptr() as usize, argv as usize, env as usize, 0],
        )
    };
    checked(result).err().unwrap_or(Errno::INVAL)
}

/// Ends this process, and runs nothing of what it shares memory with.
pub(super) fn exit(status: u8) -> ! {
    loop {
        // SAFETY: takes nothing but a number, and does not return.
        unsafe { call(libc::SYS_exit_group, [status.into(), 0, 0, 0]) };
    }
}

/// A system call of at most four arguments.
///
/// # Safety
/// That of the call.
unsafe fn call(number: i64, arguments: [usize; 4]) -> i64 {
    let result;
    let [first, second, third, fourth] = arguments;
    // SAFETY: the convention of x86-64: the result in rax, and rcx and r11 lost.
    unsafe {
        asm!(
            "syscall",
            inout("rax") number => result,
            in("rdi") first,
            in("rsi") second,
            in("rdx") third,
            in("r10") fourth,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    result
}
