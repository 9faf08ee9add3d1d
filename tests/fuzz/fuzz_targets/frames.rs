//! The decoder and every message against any bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| vmm_protocol::fuzzing::frames(input));
