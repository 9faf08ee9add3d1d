//! The guest agent that this monitor carries.

/// The agent's program: a static ELF that runs as process 1.
pub static PROGRAM: &[u8] = include_bytes!(env!("VMM_AGENT_FILE"));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agent_is_a_program_of_at_most_1_mib() {
        assert!(PROGRAM.starts_with(b"\x7fELF"));
        assert!(PROGRAM.len() <= 1 << 20, "{}", PROGRAM.len());
    }
}
