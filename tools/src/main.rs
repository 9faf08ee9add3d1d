//! The project's own tools: setup, image, kernel, nest, test, bench.

mod apt;
mod bench;
mod bzimage;
mod cases;
mod cpio;
mod error;
mod fuzz;
mod image;
mod inside;
mod kernel;
mod kvm;
mod modules;
mod nest;
mod place;
mod process;
mod random;
mod run;
mod say;
mod setup;
mod soak;
mod test;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};

use crate::error::Result;
use crate::place::Place;

/// The project's own tools.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Bring what a fresh Debian needs; does nothing twice.
    ///
    /// Rust targets, the emulator, kernels, the guests' image and the checkers of the source text. As root, system
    /// packages are installed; for an ordinary user they are unpacked into the cache ($XDG_CACHE_HOME/vmm or
    /// ~/.cache/vmm). Kernels are never installed. The other commands run the steps that they need by themselves.
    Setup,
    /// Make the guests' image and print its folder.
    ///
    /// A stock Debian cloud kernel, the modules that a guest needs and a busybox userland. Where nobody has put
    /// another there, it becomes the image that `vmm` uses without $VMM_IMAGE.
    Image {
        /// Fetch the newest kernel that Debian has, rather than keep the one in the cache.
        #[arg(long)]
        newest: bool,
    },
    /// Fetch a Debian kernel and print its folder: vmlinuz, vmlinux, config and modules.
    Kernel {
        /// Which of Debian's builds.
        #[arg(value_enum, default_value = "cloud")]
        flavour: kernel::Flavour,
        /// Fetch the newest that Debian has, rather than keep the one in the cache.
        #[arg(long)]
        newest: bool,
    },
    /// Run a workload in a fresh microVM: `vmm run -- ARGV`, where a KVM serves.
    ///
    /// Data is on stdout and stderr as the workload wrote it, all chatter on stderr; leaves with its status. Flags that
    /// are not of this command are passed on to `vmm run`.
    Run {
        #[command(flatten)]
        kvm: KvmArgument,
        /// Flags for `vmm run`, such as --memory 512M or --timeout 10s.
        #[arg(allow_hyphen_values = true, value_name = "FLAGS")]
        flags: Vec<OsString>,
        /// The workload and its arguments.
        #[arg(last = true, required = true, value_name = "ARGV")]
        argv: Vec<OsString>,
    },
    /// Run a command in the nest: a software-emulated machine with a real kvm_amd.
    ///
    /// The host's root is there read-only, with writable layers over /tmp, /run and /var/tmp that vanish; the working
    /// directory and the environment are the same. What is written to $VMM_OUT comes back. Leaves with the command's
    /// status; 124 when --timeout passed, 123 when the nest wedged twice, 125 when it could not be started.
    Nest(NestArguments),
    /// Measure the monitor beside a floor and a peer; raw samples go to target/bench.
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Run every check of the project, the cheapest first; the machine tests in one nest or on the host.
    Test(TestArguments),
    /// List the cases of tests/cases.toml with their tests, levels and results.
    ///
    /// Runs what has not run since it was built. Fails when a case has no test, or one that failed or is ignored.
    Cases {
        #[command(flatten)]
        kvm: KvmArgument,
        /// Take away each protection that has a negative control, and demand that its test fails.
        #[arg(long)]
        negative: bool,
    },
    /// Fuzz what both sides of a session read: a target for some seconds, or each of them.
    ///
    /// Inputs that find something are kept in target/fuzz/artifacts.
    Fuzz(fuzz::Arguments),
    /// Use sandboxes at random for minutes: every byte is checked, and everything is at its baseline at the end.
    Soak(soak::Arguments),
    /// An interactive shell with `vmm` on its PATH, where a KVM serves.
    Shell {
        #[command(flatten)]
        kvm: KvmArgument,
    },
}

#[derive(clap::Args)]
struct TestArguments {
    #[command(flatten)]
    kvm: KvmArgument,
    /// Run this step only; may be given several times.
    #[arg(long = "step", value_enum)]
    steps: Vec<test::Step>,
    /// Run nothing: pack the tests that need a KVM into an archive (.tar, .tar.gz or .tgz) for a machine without Rust.
    ///
    /// There: tar xf FILE && cd vmm-tests && ./run --kvm host
    #[arg(long, value_name = "FILE", conflicts_with_all = ["steps", "filter"])]
    pack: Option<PathBuf>,
    /// Run the tests whose name contains this only.
    #[arg(value_parser = filter)]
    filter: Option<String>,
}

#[derive(clap::Args)]
struct KvmArgument {
    /// Whose KVM: the host's where it serves and else the nest's, or one of them.
    #[arg(long, env = "VMM_KVM", value_enum, default_value = "auto")]
    kvm: kvm::Wish,
}

#[derive(clap::Args)]
struct NestArguments {
    /// The longest time, boot included, such as 90s or 10m.
    #[arg(long, value_parser = duration)]
    timeout: Option<Duration>,
    /// The writable folder that comes back [default: target/nest-out].
    #[arg(long)]
    out: Option<PathBuf>,
    /// The nest's memory in MiB.
    #[arg(long, default_value_t = 6144, value_parser = clap::value_parser!(u64).range(512..=65536))]
    memory: u64,
    /// The command and its arguments.
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 125 } else { 0 });
        }
    };
    match dispatch(cli.verb) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            say::step(format!("error: {error}"));
            ExitCode::from(error.status())
        }
    }
}

fn dispatch(verb: Verb) -> Result<u8> {
    let place = Place::find();
    match verb {
        Verb::Setup => setup::all(&place).map(|()| 0),
        Verb::Image { newest } => {
            let image = image::image(&place, newest)?;
            if let Some(link) = image::make_default(&image)? {
                say::step(format!("{} leads to it", link.display()));
            }
            print(&image.folder)
        }
        Verb::Kernel { flavour, newest } => {
            let kernel = kernel::kernel(&place, flavour, newest)?;
            print(kernel.bzimage.parent().unwrap_or(&kernel.bzimage))
        }
        Verb::Run { kvm, flags, argv } => run::run(&place, kvm.kvm, flags, argv),
        Verb::Bench(bench) => bench::run(&place, bench),
        Verb::Test(TestArguments {
            pack: Some(file), ..
        }) => test::pack::run(&place, &file).map(|()| 0),
        Verb::Test(TestArguments {
            kvm, steps, filter, ..
        }) => test::run(
            &place,
            &test::Options {
                wish: kvm.kvm,
                steps,
                filter,
            },
        )
        .map(|()| 0),
        Verb::Cases { negative: true, .. } => cases::negative(&place).map(|()| 0),
        Verb::Cases {
            kvm,
            negative: false,
        } => cases::show(&place, kvm.kvm).map(|()| 0),
        Verb::Fuzz(arguments) => fuzz::run(&place, &arguments).map(|()| 0),
        Verb::Soak(arguments) => soak::run(&place, &arguments),
        Verb::Shell { kvm } => run::shell(&place, kvm.kvm),
        Verb::Nest(arguments) => {
            let mut options = nest::Options::new(&place, arguments.command);
            options.timeout = arguments.timeout;
            options.memory = arguments.memory;
            options.out = arguments.out.unwrap_or(options.out);
            nest::run(&place, &options, nest::own_sinks()?)
        }
    }
}

/// The command's one line of data.
fn print(path: &Path) -> Result<u8> {
    say::data(path.display()).map(|()| 0)
}

/// A part of a test's name: it is a word of a command line in the nest.
fn filter(text: &str) -> std::result::Result<String, String> {
    let plain = !text.is_empty()
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | ':'));
    if plain {
        Ok(text.to_owned())
    } else {
        Err("expected letters, digits, _ and :".into())
    }
}

/// A time with its unit; a bare number is seconds.
fn duration(text: &str) -> std::result::Result<Duration, String> {
    let at = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let number: u64 = text[..at]
        .parse()
        .map_err(|_| "expected a number with s, m or h".to_owned())?;
    let unit = match &text[at..] {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3600,
        unit => return Err(format!("unknown unit {unit:?}: use s, m or h")),
    };
    number
        .checked_mul(unit)
        .filter(|seconds| (1..=7 * 24 * 3600).contains(seconds))
        .map(Duration::from_secs)
        .ok_or_else(|| "expected a time from 1s to 7 days".into())
}
