//! Log events and their rows in `docs/operate/monitor.md`.

use super::{production, read, section};
use std::collections::BTreeSet;

const PAGE: &str = "docs/operate/monitor.md";
/// Tables of events. Rows of the last one have no component, because it is always the same.
const TABLES: &[(&str, Option<&str>)] = &[
    ("### Events of every process", None),
    ("### Events of a worker", None),
    ("### Events of the hand-off", None),
    ("### Events of a router", Some("router")),
];
const LEVELS: &[&str] = &["error", "warn", "info", "debug"];

/// Log lines of one component with one message: their levels and fields.
#[derive(Clone, PartialEq, Eq, Debug)]
struct LogEvent {
    component: String,
    message: String,
    levels: BTreeSet<String>,
    fields: BTreeSet<String>,
}

fn set<'a>(names: impl IntoIterator<Item = &'a str>) -> BTreeSet<String> {
    names.into_iter().map(str::to_owned).collect()
}

/// The arguments of a call, from the text behind its opening parenthesis.
fn arguments(text: &str) -> Vec<&str> {
    let (mut found, mut begin, mut depth) = (Vec::new(), 0, 0);
    let (mut in_string, mut escaped) = (false, false);
    for (at, c) in text.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' if in_string => escaped = true,
            '"' => in_string = !in_string,
            _ if in_string => {}
            ')' if depth == 0 => {
                found.push(&text[begin..at]);
                break;
            }
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            ',' if depth == 0 => {
                found.push(&text[begin..at]);
                begin = at + 1;
            }
            _ => {}
        }
    }
    let arguments = found.into_iter().map(str::trim);
    arguments.filter(|argument| !argument.is_empty()).collect()
}

/// The text of a string literal. A backslash at the end of a line joins it with the next one.
fn literal(argument: &str) -> Option<String> {
    let inside = argument.strip_prefix('"')?.strip_suffix('"')?;
    Some(inside.split("\\\n").map(str::trim_start).collect())
}

/// The events that a source logs.
fn logged(source: &str) -> Vec<LogEvent> {
    let mut found = Vec::new();
    for call in source.split("event!(").skip(1) {
        // The macro's own documentation has no level.
        if let [level, component, message, fields @ ..] = &arguments(call)[..]
            && LEVELS.contains(&level.to_lowercase().as_str())
        {
            let names = fields.iter().filter_map(|field| Some(field.split_once('=')?.0.trim()));
            found.push(LogEvent {
                component: literal(component).expect("a component is a literal"),
                message: literal(message).expect("a message is a literal"),
                levels: set([level.to_lowercase().as_str()]),
                fields: set(names),
            });
        }
    }
    // Its level depends on the cause, so it does not use the macro.
    for call in source.split(".log_outcome(").skip(1) {
        found.push(LogEvent {
            component: "router".into(),
            message: literal(arguments(call)[0]).expect("a message is a literal"),
            levels: set(["warn", "debug"]),
            fields: set(["request", "worker", "cause", "why"]),
        });
    }
    found
}

/// The events of the page's tables.
fn listed(page: &str) -> Vec<LogEvent> {
    let log = section(page, "## Log");
    let rows = TABLES.iter().flat_map(|&(heading, component)| {
        let lines = section(log, heading).lines().filter(|line| line.starts_with("| "));
        lines.map(move |line| (component, line))
    });
    let events = rows.filter_map(|(component, line)| {
        let mut cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        if component.is_none() {
            cells.rotate_left(1);
        }
        let [levels, message, fields] = [cells[0], cells[1], cells[2]];
        let message = message.strip_prefix('`')?.strip_suffix('`')?;
        let own = || cells[cells.len() - 1].trim_matches('`');
        Some(LogEvent {
            component: component.unwrap_or_else(own).to_owned(),
            message: message.to_owned(),
            levels: set(levels.split(", ")),
            fields: set(fields.split('`').skip(1).step_by(2)),
        })
    });
    events.collect()
}

/// Whether a row is one of this event. On the page, `...` stands for the rest of a long message.
fn is_row_of(row: &LogEvent, event: &LogEvent) -> bool {
    let fits = match row.message.strip_suffix("...") {
        Some(begin) => event.message.starts_with(begin),
        None => event.message == row.message,
    };
    fits && row.component == event.component && !row.levels.is_disjoint(&event.levels)
}

/// How the rows differ from the events that are logged.
fn differences(rows: &[LogEvent], events: &[LogEvent]) -> Vec<String> {
    let mut found = Vec::new();
    for event in events {
        let of_it = rows.iter().filter(|row| is_row_of(row, event));
        let levels: BTreeSet<&String> = of_it.flat_map(|row| &row.levels).collect();
        for level in event.levels.iter().filter(|level| !levels.contains(level)) {
            found.push(format!("`{}` of level {level} has no row", event.message));
        }
    }
    for row in rows {
        let of_it: Vec<&LogEvent> = events.iter().filter(|event| is_row_of(row, event)).collect();
        let levels: BTreeSet<&String> = of_it.iter().flat_map(|event| &event.levels).collect();
        let fields: BTreeSet<&String> = of_it.iter().flat_map(|event| &event.fields).collect();
        if !row.levels.iter().all(|level| levels.contains(level)) {
            found.push(format!("the row `{}` has a level without an event", row.message));
        } else if fields != row.fields.iter().collect() {
            found.push(format!("the row `{}` has other fields than {fields:?}", row.message));
        }
    }
    found
}

#[test]
fn each_log_event_has_a_row_and_each_row_its_event() {
    let sources = production();
    let events: Vec<LogEvent> = sources.iter().flat_map(|source| logged(source)).collect();
    assert!(events.len() > 80, "events are found in the sources: {}", events.len());
    let written: usize = sources.iter().map(|text| text.matches(" log::write(").count()).sum();
    assert_eq!(written, 1, "only `log_outcome` does without the macro");
    let found = differences(&listed(&read(PAGE)), &events);
    assert!(found.is_empty(), "{PAGE}:\n{}", found.join("\n"));
}

#[test]
fn a_missing_row_a_dead_row_and_a_wrong_field_are_found() {
    let source = "event!(Warn, \"http\", \"it (a) broke, \\\n    and more\",\n\
        at = f(1, 2), why = x);\n\
        proxied.log_outcome(\"lost\", role, cause, cx);";
    let events = logged(source);
    let page = |of_a_process: &str, of_a_router: &str| {
        let headings = TABLES.iter().map(|(heading, _)| *heading);
        let tables = headings.zip([of_a_process, "", "", of_a_router]);
        let tables: String = tables.map(|(name, rows)| format!("{name}\n\n{rows}\n\n")).collect();
        format!("# P\n\n## Log\n\n{tables}")
    };
    let broke = "| `http` | warn | `it (a) broke, ...` | `at`, `why` | E |";
    let lost = "| warn, debug | `lost` | `request`, `worker`, `cause`, `why` | E |";
    let differ = |page: String| differences(&listed(&page), &events);
    assert_eq!(differ(page(broke, lost)), [""; 0]);
    let without = "`it (a) broke, and more` of level warn has no row";
    assert_eq!(differ(page("", lost)), [without]);
    let other = broke.replace("`http`", "`ctl`");
    let dead = "the row `it (a) broke, ...` has a level without an event";
    assert_eq!(differ(page(&other, lost)), [without, dead]);
    let fewer = broke.replace("`at`, ", "");
    let fields = "the row `it (a) broke, ...` has other fields than {\"at\", \"why\"}";
    assert_eq!(differ(page(&fewer, lost)), [fields]);
    let warn = lost.replace("warn, debug", "warn");
    assert_eq!(differ(page(broke, &warn)), ["`lost` of level debug has no row"]);
}
