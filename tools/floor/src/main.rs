//! The least a program can do to see a guest's first exit: what boot times are compared with.

fn main() {}
