//! A KVM microVM monitor with an integrated guest agent.

pub mod acpi;
pub mod agent;
pub mod boot;
pub mod bus;
pub mod cli;
pub mod console;
pub mod control;
pub mod cpuid;
mod device_loop;
pub mod doctor;
pub mod exits;
pub mod image;
pub mod kvm;
pub mod layout;
pub mod machine;
pub mod memory;
pub mod msr;
pub mod state;
mod vcpu;
