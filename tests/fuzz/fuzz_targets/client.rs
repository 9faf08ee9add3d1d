//! A client's session against whatever an agent sends.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| vmm_protocol::fuzzing::client(input));
