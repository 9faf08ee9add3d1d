//! The project's own tools: setup, image, kernel, nest, test, bench.

fn main() {}
