//! Builds the guest agent, which the monitor carries inside itself so that both always match.
//!
//! `$VMM_AGENT` names a ready one instead. The nested build has a target folder of its own beside the outer one's
//! profiles (cargo's lock forbids the same), shared by all of them.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

const TARGET: &str = "x86_64-unknown-linux-musl";

fn main() {
    println!("cargo::rerun-if-env-changed=VMM_AGENT");
    let agent = match env::var_os("VMM_AGENT") {
        Some(path) => PathBuf::from(path),
        None => build(),
    };
    println!("cargo::rerun-if-changed={}", agent.display());
    println!("cargo::rustc-env=VMM_AGENT_FILE={}", agent.display());
}

fn build() -> PathBuf {
    let manifest = PathBuf::from(variable("CARGO_MANIFEST_DIR"));
    let Some(root) = manifest.parent() else {
        fail("the crate is not in its workspace")
    };
    for part in [
        "Cargo.toml",
        "Cargo.lock",
        "guest/agent",
        "guest/protocol",
        "devices/events",
    ] {
        println!("cargo::rerun-if-changed={}", root.join(part).display());
    }
    let folder = target_folder(Path::new(&variable("OUT_DIR"))).join("agent");
    let mut cargo = Command::new(variable("CARGO"));
    cargo
        .current_dir(root)
        .args(["build", "--release", "--locked", "--quiet", "--package", "vmm-agent", "--bin", "vmm-agent"])
        .args(["--target", TARGET, "--target-dir"])
        .arg(&folder)
        // What the outer build was told is not for the guest's program.
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTFLAGS")
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .env_remove("RUSTC_WRAPPER")
        .env_remove("CARGO_BUILD_TARGET");
    match cargo.status() {
        Ok(status) if status.success() => {}
        Ok(status) => fail(&format!("building the agent for {TARGET} failed: {status}")),
        Err(error) => fail(&format!("cannot run cargo: {error}")),
    }
    folder.join(TARGET).join("release/vmm-agent")
}

/// The target folder that `out` lies in: cargo marks it.
fn target_folder(out: &Path) -> PathBuf {
    out.ancestors()
        .filter(|folder| folder.join("CACHEDIR.TAG").is_file())
        .last()
        .unwrap_or(out)
        .to_owned()
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| fail(&format!("{name} is not set")))
}

fn fail(message: &str) -> ! {
    println!("cargo::error={message}");
    std::process::exit(1)
}
