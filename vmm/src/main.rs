//! A KVM microVM monitor with an integrated guest agent.

fn main() {}
