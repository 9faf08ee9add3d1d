//! System calls without a safe wrapper elsewhere: one file each, each with a safe face.

pub mod kernel;
mod raw;
pub mod scheduling;
pub mod signals;
pub mod spawn;
pub mod vsock;

/// Why the last call through the C library failed.
fn last_errno() -> rustix::io::Errno {
    let error = std::io::Error::last_os_error().raw_os_error();
    error.map_or(
        rustix::io::Errno::INVAL,
        rustix::io::Errno::from_raw_os_error,
    )
}
