//! What every fast guest shares: the way from the monitor's entry to user mode, ports, a console, an end.
//!
//! A KVM without hardware support runs user mode at full speed and emulates supervisor code slowly, with
//! neither IRET nor SYSRET. So the entry is a dozen supervisor instructions: page tables of our own (in
//! the image, so that nothing is computed) with every page open to user mode, I/O privilege 3 and an empty
//! permission bitmap, SYSEXIT.
//! From there on the guest polls: no interrupt is ever enabled.
#![allow(dead_code, reason = "each guest uses its own part")]

use core::arch::{asm, global_asm};
use core::fmt::{self, Write};
use core::panic::PanicInfo;

global_asm!(
    r#"
    .section .tables, "a"
    .balign 4096
pml4:
    .quad pdpt + 0x7
    .fill 511, 8, 0
    # The first and the fourth GiB, identity mapped in 2 MiB pages: present, writable, user, accessed, dirty.
pdpt:
    .quad low + 0x7, 0, 0, high + 0x7
    .fill 508, 8, 0
low:
    .set page, 0
    .rept 512
    .quad page + 0xe7
    .set page, page + 0x200000
    .endr
high:
    .set page, 0xc0000000
    .rept 512
    .quad page + 0xe7
    .set page, page + 0x200000
    .endr
    # Vectors 0 to 6: only invalid opcode has a gate. All else is a triple fault, which is meant.
idt:
    .fill 96, 1, 0
    .short ud_low, 0x10, 0x8e00, ud_high
    .quad 0
idt_pointer:
    .short 111
    .quad idt
    # One code segment, for that gate, and a task segment, for its I/O permission bitmap.
    .balign 8
gdt:
    .quad 0, 0, 0x00af9b000000ffff, 0x00cf93000000ffff
    .short 8192, tss_low
    .byte tss_middle, 0x89, 0, tss_high
    .quad 0
gdt_pointer:
    .short 47
    .quad gdt

    .section .text.start, "ax"
    .global _start
_start:
    mov ecx, 0x174              # IA32_SYSENTER_CS: SYSEXIT makes CS and SS of it, without reading a GDT
    mov eax, 8
    xor edx, edx
    wrmsr
    lidt [idt_pointer]
    lgdt [gdt_pointer]
    mov eax, 0x20
    ltr ax
    mov eax, offset pml4
    mov cr3, rax
    mov esp, offset stack_top
    push 0x3002                 # I/O privilege level 3, interrupts off
    popfq
    mov rdi, rsi                # boot_params
    mov ecx, offset stack_top
    mov edx, offset user
    .byte 0x48, 0x0f, 0x35      # sysexitq
    # AMD has no SYSEXIT in long mode. There the hardware runs supervisor code as well as any: stay.
    .global stay_in_supervisor
    .global tss
stay_in_supervisor:
    mov esp, offset stack_top
user:
    call {entry}
    ud2

    .section .bss, "aw", @nobits
    .balign 16
    # kvm_pvm ignores the I/O privilege level and reads the bitmap: all zero, its offset too, is every port.
tss:
    .skip 8208
    .skip 32768
stack_top:
"#,
    entry = sym entry,
);

unsafe extern "Rust" {
    /// The guest's own program.
    safe fn guest(command_line: &'static [u8]);
}

extern "C" fn entry(boot_params: *const u8) -> ! {
    // SAFETY: the 64-bit boot protocol passes boot_params in RSI; the command line is NUL terminated.
    let command_line = unsafe {
        let pointer = boot_params.add(0x228).cast::<u32>().read_unaligned() as *const u8;
        let mut length = 0;
        while !pointer.is_null() && length < 4096 && *pointer.add(length) != 0 {
            length += 1;
        }
        if length == 0 {
            &[]
        } else {
            core::slice::from_raw_parts(pointer, length)
        }
    };
    guest(command_line);
    power_off()
}

/// Ends the machine: ACPI S5 where the monitor has it, else the keyboard controller's reset.
pub fn power_off() -> ! {
    out8(SLEEP_CONTROL, SLEEP_S5);
    out8(0x64, 0xfe);
    loop {
        core::hint::spin_loop();
    }
}

/// Asks for a reset by the keyboard controller, the oldest way.
pub fn reset() -> ! {
    out8(0x64, 0xfe);
    loop {
        core::hint::spin_loop();
    }
}

/// ACPI sleep control register of `vmm` (`SLP_TYP` 5, `SLP_EN`).
pub const SLEEP_CONTROL: u16 = 0x600;
const SLEEP_S5: u8 = 5 << 2 | 1 << 5;
/// Data register of the first serial port.
pub const SERIAL: u16 = 0x3f8;

/// Writes one byte to a port.
pub fn out8(port: u16, value: u8) {
    // SAFETY: a port write has no effect on this program's memory.
    unsafe {
        asm!("out dx, al", in("dx") port, in("al") value, options(nomem, nostack, preserves_flags))
    }
}

/// Writes two bytes to a port.
pub fn out16(port: u16, value: u16) {
    // SAFETY: as above.
    unsafe {
        asm!("out dx, ax", in("dx") port, in("ax") value, options(nomem, nostack, preserves_flags))
    }
}

/// Writes four bytes to a port.
pub fn out32(port: u16, value: u32) {
    // SAFETY: as above.
    unsafe {
        asm!("out dx, eax", in("dx") port, in("eax") value, options(nomem, nostack, preserves_flags))
    }
}

/// Reads one byte from a port.
pub fn in8(port: u16) -> u8 {
    let value;
    // SAFETY: as above.
    unsafe {
        asm!("in al, dx", in("dx") port, out("al") value, options(nomem, nostack, preserves_flags))
    }
    value
}

/// Reads two bytes from a port.
pub fn in16(port: u16) -> u16 {
    let value;
    // SAFETY: as above.
    unsafe {
        asm!("in ax, dx", in("dx") port, out("ax") value, options(nomem, nostack, preserves_flags))
    }
    value
}

/// Reads four bytes from a port.
pub fn in32(port: u16) -> u32 {
    let value;
    // SAFETY: as above.
    unsafe {
        asm!("in eax, dx", in("dx") port, out("eax") value, options(nomem, nostack, preserves_flags))
    }
    value
}

/// Cycles since the machine started.
pub fn cycles() -> u64 {
    // SAFETY: reading the time stamp counter has no other effect; user mode may (CR4.TSD is clear).
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// A read of device memory that is neither merged nor left out.
pub fn load<T: Copy>(address: u64) -> T {
    // SAFETY: every address given is identity mapped and holds no Rust object.
    unsafe { (address as *const T).read_volatile() }
}

/// A write of device memory that is neither merged nor left out.
pub fn store<T: Copy>(address: u64, value: T) {
    // SAFETY: as above.
    unsafe { (address as *mut T).write_volatile(value) }
}

/// The console: the first serial port, byte by byte.
pub struct Console;

impl Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            out8(SERIAL, byte);
        }
        Ok(())
    }
}

/// Prints a line on the console.
#[macro_export]
macro_rules! say {
    ($($part:tt)*) => {{
        use core::fmt::Write as _;
        let _ = writeln!($crate::machine::Console, $($part)*);
    }};
}

/// The value of `name=` on the command line, the last one given.
pub fn option<'a>(command_line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    command_line
        .split(|byte| *byte == b' ')
        .rev()
        .find_map(|word| word.strip_prefix(name)?.strip_prefix(b"="))
}

/// A number, decimal or `0x` hexadecimal, up to the first other character.
pub fn number(text: &[u8]) -> u64 {
    let (digits, radix) = match text.strip_prefix(b"0x") {
        Some(rest) => (rest, 16),
        None => (text, 10),
    };
    digits
        .iter()
        .map_while(|byte| (*byte as char).to_digit(radix))
        .fold(0, |sum, digit| {
            sum.wrapping_mul(u64::from(radix))
                .wrapping_add(u64::from(digit))
        })
}

#[panic_handler]
fn panic(info: &PanicInfo) -> ! {
    say!("guest panic: {info}");
    power_off()
}
