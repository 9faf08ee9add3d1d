//! `vmm doctor`: what this host can do, and the command that mends what it cannot.

use std::io::{self, Write};

use clap::Args;
use serde_json::json;

use super::{chain, say, status};
use crate::image::Image;
use crate::{agent, doctor};

/// Flags of `vmm doctor`.
#[derive(Debug, Args)]
pub struct Doctor {
    /// One JSON object
    #[arg(long)]
    json: bool,
}

impl Doctor {
    /// Looks and reports; 0 if a stock kernel would run here, 1 if not.
    pub fn main(&self) -> u8 {
        let kvm = doctor::kvm();
        let image = Image::find(None, None, false);
        let well = kvm == doctor::Kvm::Hardware && image.is_ok();
        let report = if self.json {
            json(&kvm, &image)
        } else {
            text(&kvm, &image)
        };
        if let Err(error) = writeln!(io::stdout(), "{report}") {
            say(&format!("vmm: cannot write to stdout: {error}"));
            return status::FAILED;
        }
        if well { status::OK } else { status::FAILED }
    }
}

type Found = Result<Image, crate::image::Error>;

fn text(kvm: &doctor::Kvm, image: &Found) -> String {
    let mut lines = vec![format!("kvm    {}: {}", kvm.name(), kvm.meaning())];
    lines.extend(
        kvm.remedy()
            .map(|remedy| format!("       mend with: {remedy}")),
    );
    match image {
        Ok(image) => {
            lines.push(format!(
                "image  {}",
                image.folder.as_deref().unwrap_or(&image.kernel).display()
            ));
            lines.push(format!("       kernel {}", image.kernel.display()));
            lines.extend(
                image
                    .initramfs
                    .as_ref()
                    .map(|path| format!("       initramfs {}", path.display())),
            );
        }
        Err(error) => lines.push(format!("image  none: {}", chain(error))),
    }
    lines.push(format!("agent  built in, {} bytes", agent::PROGRAM.len()));
    lines.push(format!("state  {}", crate::sandbox::root(None).display()));
    lines.join("\n")
}

fn json(kvm: &doctor::Kvm, image: &Found) -> String {
    let image = match image {
        Ok(image) => json!({
            "folder": image.folder, "kernel": image.kernel, "initramfs": image.initramfs,
        }),
        Err(error) => json!({"error": chain(error)}),
    };
    json!({
        "schema": 1,
        "kvm": kvm.name(),
        "meaning": kvm.meaning(),
        "remedy": kvm.remedy(),
        "image": image,
        "agent_bytes": agent::PROGRAM.len(),
        "state_root": crate::sandbox::root(None),
    })
    .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Kvm;

    #[test]
    fn report_has_kind_remedy_and_image() {
        let image = Ok(Image {
            folder: Some("/images/x".into()),
            kernel: "/images/x/vmlinux".into(),
            initramfs: Some("/images/x/initramfs.cpio".into()),
        });
        let shown = text(&Kvm::NoPermission, &image);
        assert!(
            shown.contains("no-permission") && shown.contains("usermod"),
            "{shown}"
        );
        assert!(shown.contains("kernel /images/x/vmlinux"), "{shown}");
        let line: serde_json::Value =
            serde_json::from_str(&json(&Kvm::NoHardware, &image)).unwrap();
        assert_eq!(
            (&line["kvm"], &line["image"]["folder"]),
            (&json!("no-hardware"), &json!("/images/x"))
        );
    }
}
