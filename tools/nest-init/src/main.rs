//! Init of the nest: mounts the host's root and runs one command in it.

fn main() {}
