//! An agent's session against whatever a client sends.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| vmm_protocol::fuzzing::agent(input));
