//! `vmm ps` and `vmm inspect`.

use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};

use super::activity::{self, Activity};
use super::{Error, Target, print, status, summary, write};
use crate::cli::{chain, say, units};
use crate::sandbox::{self, Name, Sandbox, State};

/// `vmm ps`
#[derive(Debug, Args)]
pub struct Ps {
    /// Those that have ended, too
    #[arg(short, long)]
    all: bool,
    /// Only this one, whatever its state, with its execs
    #[arg(value_name = "NAME")]
    name: Option<Name>,
    /// State root
    #[arg(long, value_name = "ROOT", value_parser = units::folder)]
    dir: Option<PathBuf>,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

impl Ps {
    /// Lists sandboxes: those that run or were killed, and with `-a` those that have ended.
    pub fn main(&self) -> Result<u8, Error> {
        let root = sandbox::root(self.dir.as_deref());
        let sandboxes = match &self.name {
            Some(name) => vec![Sandbox::new(&root, name.clone()).existing()?],
            None => Sandbox::list(&root)?,
        };
        let mut rows = Vec::new();
        let mut worst = status::OK;
        for sandbox in sandboxes {
            match summary(&sandbox) {
                Ok((State::Ended, _)) if !self.all && self.name.is_none() => {}
                Ok((_, row)) => rows.push(row),
                // Removed between the list and the look.
                Err(_) if !sandbox.exists() => {}
                Err(error) => {
                    // One that is damaged hides no other.
                    say(&format!("vmm: {}", chain(&error)));
                    worst = status::FAILED;
                }
            }
        }
        let execs = match &self.name {
            Some(name) => self.execs(name, &mut rows)?,
            None => String::new(),
        };
        if self.json {
            let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
            write(&lines)?;
        } else {
            write(&(table(&rows) + &execs))?;
        }
        Ok(worst)
    }

    /// Adds the execs of the one sandbox that was asked for to its row; the answer is for people.
    fn execs(&self, name: &Name, rows: &mut [Value]) -> Result<String, Error> {
        let target = Target {
            name: name.clone(),
            dir: self.dir.clone(),
        };
        let execs = Activity::of(&target, &target.sandbox()?.view()?).execs;
        if let Some(row) = rows.first_mut() {
            let rows: Option<Vec<Value>> = execs
                .as_ref()
                .map(|execs| execs.iter().map(activity::row).collect());
            row["execs"] = json!(rows);
        }
        Ok(match execs.as_deref() {
            None | Some([]) => String::new(),
            Some(execs) => format!("\n{}", activity::table(execs)),
        })
    }
}

fn table(rows: &[Value]) -> String {
    let mut text = format!(
        "{:<20} {:<9} {:>8} {:>10} {:>4} {:>9} {:>6}  COMMAND\n",
        "NAME", "STATE", "PID", "GENERATION", "CPUS", "MEMORY", "STATUS"
    );
    for row in rows {
        let number = |value: &Value| {
            value
                .as_u64()
                .map_or_else(|| "-".to_owned(), |number| number.to_string())
        };
        // The counter tells lives apart for people; --json has the whole id.
        let counter = row["generation"]
            .as_str()
            .and_then(|text| text.split('-').next())
            .unwrap_or("-");
        let words = row["command"]
            .as_array()
            .map(Vec::as_slice)
            .unwrap_or_default();
        let command: Vec<&str> = words.iter().filter_map(Value::as_str).collect();
        let command: String = command
            .join(" ")
            .chars()
            .filter(|c| !c.is_control())
            .take(40)
            .collect();
        let memory = row["memory"]
            .as_u64()
            .map_or_else(|| "-".to_owned(), |bytes| format!("{}M", bytes >> 20));
        let line = format!(
            "{:<20} {:<9} {:>8} {:>10} {:>4} {:>9} {:>6}  {command}",
            row["name"].as_str().unwrap_or_default(),
            row["state"].as_str().unwrap_or_default(),
            number(&row["pid"]),
            counter,
            number(&row["cpus"]),
            memory,
            number(&row["status"]),
        );
        text += line.trim_end();
        text.push('\n');
    }
    text
}

/// `vmm inspect`
#[derive(Debug, Args)]
pub struct Inspect {
    #[command(flatten)]
    target: Target,
    /// On one line
    #[arg(long)]
    json: bool,
}

impl Inspect {
    /// Prints all that is known of it but its nonce.
    pub fn main(&self) -> Result<u8, Error> {
        let sandbox = self.target.sandbox()?;
        let view = sandbox.view()?;
        let holder = view.holder.as_ref().filter(|_| view.state.is_alive());
        let sockets = holder.map(|holder| {
            let folder = sandbox.file(&holder.generation.folder());
            json!({"vsock": folder.join("vsock.sock"), "control": folder.join("control.sock")})
        });
        let activity = Activity::of(&self.target, &view);
        let execs: Option<Vec<Value>> = activity
            .execs
            .as_ref()
            .map(|execs| execs.iter().map(activity::row).collect());
        let value = json!({
            "name": sandbox.name().as_str(),
            "state": view.state.name(),
            "activity": activity.json(),
            "execs": execs,
            "folder": sandbox.folder(),
            "pid": holder.map(|holder| holder.process.pid),
            "generation": view.holder.as_ref().map(|holder| holder.generation.to_string()),
            "sockets": sockets,
            "config": view.config,
            "last": view.last,
        });
        if self.json {
            print(&value)
        } else {
            write(&format!("{value:#}\n"))
        }
    }
}
