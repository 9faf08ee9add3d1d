//! Builds each `guest/<name>.rs` for a bare machine and hands its bytes to the library.
//!
//! The compiler is called directly, as a guest is one file for another target with a linker script of
//! its own: a nested cargo would only add a lock and a target folder.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{env, fs};

/// The guests, each a file of this name in `guest/`.
const GUESTS: &[&str] = &["serial", "ends", "noise", "transport", "vsock"];

fn main() -> ExitCode {
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            println!("cargo::error={why}");
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<(), String> {
    let sources = PathBuf::from(env_var("CARGO_MANIFEST_DIR")?).join("guest");
    let out = PathBuf::from(env_var("OUT_DIR")?);
    let rustc = env_var("RUSTC")?;
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=guest");
    for name in GUESTS {
        let source = sources.join(name).with_extension("rs");
        let elf = out.join(name).with_extension("elf");
        compile(&rustc, &sources, &source, &elf)?;
        let size = fs::metadata(&elf)
            .map_err(|e| format!("{}: {e}", elf.display()))?
            .len();
        // The loader of a monitor copies the file: a guest that grew would be measured, not the monitor.
        if size > 64 * 1024 {
            return Err(format!(
                "guest {name} is {size} bytes: a fast guest has at most 64 KiB"
            ));
        }
    }
    Ok(())
}

fn compile(rustc: &str, sources: &Path, source: &Path, elf: &Path) -> Result<(), String> {
    let output = Command::new(rustc)
        .args(["--edition=2024", "--crate-type=bin", "--target=x86_64-unknown-none"])
        .args(["-Copt-level=2", "-Cpanic=abort", "-Crelocation-model=static", "-Cstrip=symbols"])
        .args(["-Dwarnings", "-Dunsafe_op_in_unsafe_fn"])
        .arg(format!("-Clink-arg=-T{}", sources.join("guest.ld").display()))
        // The same bytes wherever the checkout lies.
        .arg(format!("--remap-path-prefix={}=guest", sources.display()))
        // One page size for file and memory keeps the file small.
        .args(["-Clink-arg=-zmax-page-size=4096", "-Clink-arg=--no-pie", "-Clink-arg=--build-id=none"])
        .arg("-o")
        .arg(elf)
        .arg(source)
        .output()
        .map_err(|e| format!("{rustc}: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!(
        "guest {} does not build (target x86_64-unknown-none installed? `rustup target add x86_64-unknown-none`):\n{}",
        source.display(),
        String::from_utf8_lossy(&output.stderr)
    ))
}

fn env_var(name: &str) -> Result<String, String> {
    env::var(name).map_err(|_| format!("{name} is not set: run by cargo only"))
}
