//! What the two ends of the nest share: the host's side (`xtask`) and the nest's init.
//!
//! The nest is a software-emulated machine with a real `kvm_amd` in it. Four virtio-serial ports join it to
//! the host, each a Unix socket on the host and a character device in the nest:
//!
//! ```text
//!  xtask                       QEMU                        nest-init (PID 1)        the command
//!  control  ==== socket ==== virtserialport 1 ==== /dev/vport?p1   job, status
//!  stdin    ---- socket ---> virtserialport 2 ---> /dev/vport?p2   ---- pipe ---->  0
//!  stdout   <--- socket ---- virtserialport 3 <--- /dev/vport?p3   <--- pipe -----  1
//!  stderr   <--- socket ---- virtserialport 4 <--- /dev/vport?p4   <--- pipe -----  2
//! ```
//!
//! A port has no end of file that can be relied on, so each direction carries chunks ([`wire`]): a length,
//! then that many bytes, and a length of zero for the end.
//!
//! ```
//! use nest_init::wire::{read_chunk, write_chunk};
//!
//! let mut port = Vec::new();
//! write_chunk(&mut port, b"out\n")?;
//! write_chunk(&mut port, b"")?;
//! let mut port = port.as_slice();
//! assert_eq!(read_chunk(&mut port)?, b"out\n");
//! assert_eq!(read_chunk(&mut port)?, b"");
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! Limits: a chunk is at most [`wire::CHUNK_MAX`] bytes. Both ends are built from the same commit, so there is
//! no version. Errors are [`std::io::Error`]; a malformed message is `InvalidData`.

pub mod wire;
