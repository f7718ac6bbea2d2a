//! Prints the settings as documentation: `knob_table markdown` the table of all knobs,
//! `knob_table env-keys` the `environment_variables` of an Envoy `vm_config`.

use pd_wire::knobs::{KNOBS, Kind, Knob, Knobs, Reader};
use std::fmt::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    let text = match std::env::args().nth(1).as_deref() {
        Some("markdown") => markdown(),
        Some("env-keys") => env_keys(),
        _ => {
            eprintln!("usage: knob_table markdown|env-keys");
            return ExitCode::from(2);
        }
    };
    print!("{text}");
    ExitCode::SUCCESS
}

fn markdown() -> String {
    let mut text = String::from(
        "| Setting | Default | Allowed | Variable | In `routingConfig` | Read by | What it does |\n\
         |---|---|---|---|---|---|---|\n",
    );
    for knob in KNOBS {
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "| `{}` | {} | {} | {} | {} | {} | {} |",
            knob.name,
            default(knob),
            allowed(&knob.kind),
            code(knob.variable),
            code(knob.profile),
            knob.reader.name(),
            knob.doc,
        );
    }
    text
}

fn default(knob: &Knob) -> String {
    match (Knobs::default().get(knob.name), knob.kind) {
        (_, Kind::Hashes) => "none".to_owned(),
        (None, _) => "unset".to_owned(),
        (Some(value), Kind::Choice(_) | Kind::Text) => {
            format!("`{}`", value.to_json().as_str().unwrap_or_default())
        }
        (Some(value), Kind::Duration { unit, .. }) => {
            format!("{} {}", value.to_json(), unit.name())
        }
        (Some(value), _) => value.to_json().to_string(),
    }
}

fn allowed(kind: &Kind) -> String {
    match kind {
        Kind::Bool => "`true`, `false`".to_owned(),
        Kind::Integer { min, max } if *max == u64::MAX => format!("whole, {min} to 2^64 − 1"),
        Kind::Integer { min, max } => format!("whole, {min} to {max}"),
        Kind::Number { min, max } => format!("{min} to {max}"),
        Kind::Positive { .. } => "above 0".to_owned(),
        Kind::Duration { unit, min, max } => format!("{min} to {max} {}", unit.name()),
        Kind::Choice(names) => {
            let names: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
            names.join(", ")
        }
        Kind::Text | Kind::Secret => "text".to_owned(),
        Kind::Hashes => "list of SHA-256 hashes in hexadecimal".to_owned(),
    }
}

fn code(text: Option<&str>) -> String {
    text.map_or("–".to_owned(), |text| format!("`{text}`"))
}

fn env_keys() -> String {
    let mut text = String::from("environment_variables:\n  host_env_keys:\n");
    for variable in KNOBS
        .iter()
        .filter(|knob| knob.reader == Reader::Filter)
        .filter_map(|knob| knob.variable)
    {
        let _ = writeln!(text, "  - {variable}");
    }
    text
}
