//! Boot of a kernel by the 64-bit protocol (Linux `Documentation/arch/x86/boot.rst`).
//!
//! ```text
//! file -> kernel::check -> kernel::load -> Kernel{entry, end, header}
//!                                            | end: where the initramfs may begin
//!         initramfs::load  ------------------+
//!         cmdline, e820    -> params::write  -> boot_params at 0x7000
//!         registers::write -> GDT, page tables; the first vCPU enters 64-bit mode at `entry`
//! ```

pub mod cmdline;
pub mod initramfs;
pub mod kernel;
pub mod params;
pub mod registers;
