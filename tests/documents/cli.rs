//! `docs/api/cli.md` must agree with the flags. `BATON_WRITE_DOCS=1` writes the page again.

use baton::cli::command_line;
use clap::{Arg, Command};
use std::fmt::Write;

const PAGE: &str = "docs/api/cli.md";

/// The page: a section for each command, a table row for each flag.
fn page() -> String {
    let mut page = String::from(
        "# Command line\n\nThis page is generated from the flags. \
         `baton COMMAND --help` also explains each value of a flag.\n\
         This page also lists other names of flags.\n",
    );
    let mut root = command_line();
    root.build();
    sections(&root, "baton", &mut page);
    page
}

fn sections(command: &Command, name: &str, page: &mut String) {
    for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
        let name = format!("{name} {}", sub.get_name());
        let _ = write!(page, "\n## {name}\n\n");
        if let Some(about) = sub.get_long_about().or(sub.get_about()) {
            let _ = writeln!(page, "{}\n", wrapped(&plain(&about.to_string())));
        }
        let args: Vec<&Arg> = sub
            .get_arguments()
            .filter(|arg| !["help", "version"].contains(&arg.get_id().as_str()))
            .filter(|arg| !arg.is_hide_set())
            .collect();
        if !args.is_empty() {
            page.push_str("| Flag | Meaning | Default |\n|---|---|---|\n");
            for arg in args {
                let _ = writeln!(page, "| `{}` | {} | {} |", flag(arg), meaning(arg), default(arg));
            }
        }
        sections(sub, &name, page);
    }
}

fn flag(arg: &Arg) -> String {
    let values: Vec<String> =
        arg.get_value_names().unwrap_or_default().iter().map(ToString::to_string).collect();
    let takes_value = arg.get_num_args().is_some_and(|count| count.takes_values());
    let values = if takes_value { values.join(" ") } else { String::new() };
    match arg.get_long() {
        Some(long) => format!("--{long} {values}").trim().to_owned(),
        None => values,
    }
}

/// The help, and the default that it states at its end or in it. Several defaults stay in the help.
fn help(arg: &Arg) -> (String, String) {
    let help = arg.get_long_help().or(arg.get_help()).map(ToString::to_string).unwrap_or_default();
    let help = plain(&help);
    let parts: Vec<&str> = help.split(" [default: ").collect();
    match parts[..] {
        [before, after] => {
            let (default, after) = after.split_once(']').expect("the bracket is closed");
            (format!("{before}{after}"), default.to_owned())
        }
        _ => (help, String::new()),
    }
}

fn meaning(arg: &Arg) -> String {
    let (mut meaning, _) = help(arg);
    let values: Vec<String> = arg
        .get_possible_values()
        .iter()
        .filter(|value| !value.is_hide_set())
        .map(|value| format!("`{}`", value.get_name()))
        .collect();
    let is_switch = !arg.get_num_args().is_some_and(|count| count.takes_values());
    if !values.is_empty() && !is_switch {
        let end = if meaning.ends_with('.') { "" } else { "." };
        let _ = write!(meaning, "{end} Values: {}.", values.join(", "));
    }
    let aliases: Vec<String> = arg
        .get_all_aliases()
        .unwrap_or_default()
        .iter()
        .map(|name| format!("`--{name}`"))
        .collect();
    if !aliases.is_empty() {
        let end = if meaning.ends_with('.') { "" } else { "." };
        let _ = write!(meaning, "{end} Also {}.", aliases.join(", "));
    }
    meaning.trim().to_owned()
}

fn default(arg: &Arg) -> String {
    let is_switch = !arg.get_num_args().is_some_and(|count| count.takes_values());
    let values: Vec<String> =
        arg.get_default_values().iter().map(|value| value.to_string_lossy().into_owned()).collect();
    if is_switch || values.is_empty() { help(arg).1 } else { format!("`{}`", values.join(" ")) }
}

/// One line that a table can hold.
fn plain(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

/// The text in lines of at most 100 columns.
fn wrapped(text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("one line at least");
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > 100 {
            lines.push(word.to_owned());
        } else {
            let space = if line.is_empty() { "" } else { " " };
            line.extend([space, word]);
        }
    }
    lines.join("\n")
}

#[test]
fn the_page_of_the_command_line_is_that_of_the_flags() {
    let path = std::path::Path::new(super::ROOT).join(PAGE);
    if std::env::var_os("BATON_WRITE_DOCS").is_some() {
        std::fs::write(&path, page()).unwrap();
    }
    let written = super::read(PAGE);
    assert!(
        written == page(),
        "{PAGE} is not what the flags say: BATON_WRITE_DOCS=1 cargo test --test documents"
    );
}
