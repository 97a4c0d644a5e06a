//! Error codes and their rows in `docs/operate/troubleshoot.md`.

use super::{production, read, rows, section};
use baton::api::ErrorCode;
use baton::cause::Cause;

const PAGE: &str = "docs/operate/troubleshoot.md";

/// How the page differs from the code. `ErrorCode` has all codes, because it alone makes them.
fn differences(page: &str, causes: &[Cause], others: &[ErrorCode]) -> Vec<String> {
    let mut found = Vec::new();
    let cause_rows = rows(section(page, "## Causes"));
    let other_rows = rows(section(page, "## Other codes"));
    for cause in causes {
        let name = cause.name();
        let row = cause_rows.iter().find(|(code, _)| *code == name);
        let status = cause.http_status().to_string();
        match row {
            None => found.push(format!("the cause `{name}` has no row")),
            Some((_, cells)) if cells[1] != status => {
                found.push(format!("`{name}` has status {status}, and its row has {}", cells[1]));
            }
            Some(_) => {}
        }
    }
    for code in others.iter().map(|code| code.name()) {
        if !other_rows.iter().any(|(known, _)| *known == code) {
            found.push(format!("the code `{code}` has no row"));
        }
    }
    for (code, _) in &cause_rows {
        if !causes.iter().any(|cause| cause.name() == *code) {
            found.push(format!("no cause is named `{code}`"));
        }
    }
    for (code, _) in &other_rows {
        if !others.iter().any(|known| known.name() == *code) {
            found.push(format!("no error has the code `{code}`"));
        }
    }
    found
}

/// Codes that no source gives to an error.
fn unused(codes: &[ErrorCode], sources: &[String]) -> Vec<&'static str> {
    let is_used = |code: &&ErrorCode| {
        let name = format!("ErrorCode::{code:?}");
        let ends = |rest: &str| !rest.starts_with(|c: char| c.is_ascii_alphanumeric());
        sources.iter().any(|text| text.split(&name).skip(1).any(ends))
    };
    codes.iter().filter(|code| !is_used(code)).map(|code| code.name()).collect()
}

#[test]
fn each_error_code_and_cause_has_a_row_and_each_row_its_code() {
    let found = differences(&read(PAGE), Cause::ALL, ErrorCode::OTHERS);
    assert!(found.is_empty(), "{PAGE}:\n{}", found.join("\n"));
}

#[test]
fn each_error_code_is_used() {
    assert_eq!(unused(ErrorCode::OTHERS, &production()), [""; 0], "codes that no error has");
}

#[test]
fn codes_in_the_index_exist() {
    let page = read(PAGE);
    let listed = rows(section(&page, "### 503 Service Unavailable"));
    assert!(listed.len() >= 5, "{listed:?}");
    for (code, _) in listed {
        let is_other = ErrorCode::OTHERS.iter().any(|known| known.name() == code);
        assert!(is_other || Cause::named(code).is_some(), "{PAGE}: no error has the code `{code}`");
    }
}

#[test]
fn a_missing_row_a_dead_row_and_a_wrong_status_are_found() {
    let page = |causes: &str, others: &str| {
        format!("# P\n\n## Causes\n\n{causes}\n### More\n\n## Other codes\n\n{others}\n")
    };
    let differ =
        |page: String| differences(&page, &[Cause::Refused], &[ErrorCode::UnsupportedField]);
    let [refused, unsupported] = ["| `refused` | 400 | M |", "| `unsupported_field` | 400 | M |"];
    assert_eq!(differ(page(refused, unsupported)), [""; 0]);
    assert_eq!(differ(page("", unsupported)), ["the cause `refused` has no row"]);
    assert_eq!(differ(page(refused, "")), ["the code `unsupported_field` has no row"]);
    assert_eq!(
        differ(page("| `refused` | 404 | M |", unsupported)),
        ["`refused` has status 400, and its row has 404"]
    );
    assert_eq!(
        differ(page(&format!("{refused}\n| `gone` | 400 | M |"), unsupported)),
        ["no cause is named `gone`"]
    );
    assert_eq!(
        differ(page(refused, &format!("{unsupported}\n| `gone` | 400 | M |"))),
        ["no error has the code `gone`"]
    );
    let sources = ["ApiError::new(404, ErrorCode::NotFound, why)".to_owned()];
    assert_eq!(unused(&[ErrorCode::NotFound, ErrorCode::NoWorker], &sources), ["no_worker"]);
}
