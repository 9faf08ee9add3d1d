//! The guest's init: runs workloads and streams their output over vsock.

fn main() {}
