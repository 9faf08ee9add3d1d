//! The kernel modules that the image lists.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::log::Log;

/// One path a line in the order of loading; empty lines and `#` comments are skipped.
pub const LIST: &str = "/lib/vmm/modules";

/// MODULE_INIT_COMPRESSED_FILE of linux/module.h.
const COMPRESSED: i32 = 4;

/// The paths in a list.
///
/// ```
/// let list = b"# vsock\n/lib/a.ko\n\n /lib/b.ko.xz \n";
/// let paths: Vec<_> = vmm_agent::init::modules::paths(list).collect();
/// assert_eq!(paths, [std::path::Path::new("/lib/a.ko"), std::path::Path::new("/lib/b.ko.xz")]);
/// ```
pub fn paths(list: &[u8]) -> impl Iterator<Item = &Path> {
    list.split(|byte| *byte == b'\n')
        .map(<[u8]>::trim_ascii)
        .filter(|line| !line.is_empty() && !line.starts_with(b"#"))
        .map(|line| Path::new(OsStr::from_bytes(line)))
}

/// Loads all of [`LIST`]; no list is an empty one. What fails is logged by name and left out.
pub fn load_all(log: &mut Log) {
    let list = match std::fs::read(LIST) {
        Ok(list) => list,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return,
        Err(error) => return log.error(format_args!("cannot read {LIST}: {error}")),
    };
    for path in paths(&list) {
        match load(path) {
            // Loaded already, or built in under that name.
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => log.error(format_args!(
                "cannot load module {}: {error}",
                path.display()
            )),
        }
    }
}

fn load(path: &Path) -> Result<(), Errno> {
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let plain = path.extension().is_none_or(|extension| extension == "ko");
    rustix::system::finit_module(file, c"", if plain { 0 } else { COMPRESSED })
}
