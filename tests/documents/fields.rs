//! `docs/api/fields.md` lists each field of the request classes of vLLM and SGLang
//! (`tests/goldens/fields.json`) with what Baton does. `BATON_WRITE_DOCS=1` writes the page again.
//!
//! What Baton does is found by trying values: a field is honoured if a value changes the request or
//! gets an error about the value.

use baton::api::{
    ApiError, GenerateRequest, Sampling, TranslatedEndpoint, chat, completion, generate,
    peer_fields,
};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

const PAGE: &str = "docs/api/fields.md";
const ENDPOINTS: [&str; 6] =
    ["chat", "completions", "generate", "sampling_params", "responses", "messages"];

/// A body of the endpoint with this field more: the request, and what its answer needs.
fn parse(
    endpoint: &str,
    field: Option<(&str, &Value)>,
) -> Result<(GenerateRequest, String), ApiError> {
    let messages = json!([{"role": "user", "content": "a"}]);
    let mut body = match endpoint {
        "chat" => json!({ "messages": messages }),
        "messages" => json!({"messages": messages, "max_tokens": 9}),
        "responses" => json!({"input": "a"}),
        "completions" => json!({"prompt": "a"}),
        _ => json!({"text": "a"}),
    };
    let target = match endpoint {
        "sampling_params" => body["sampling_params"].as_object_mut(),
        _ => None,
    };
    let own: &mut Map<String, Value> = match target {
        Some(own) => own,
        None if endpoint == "sampling_params" => {
            body["sampling_params"] = json!({});
            body["sampling_params"].as_object_mut().unwrap()
        }
        None => body.as_object_mut().unwrap(),
    };
    if let Some((name, value)) = field {
        own.insert(name.into(), value.clone());
    }
    let (mut body, defaults) = (body.to_string().into_bytes(), Sampling::default());
    let mut answer = String::new();
    if let Some(translated) = TranslatedEndpoint::at(&format!("/v1/{endpoint}")) {
        let translator;
        (body, translator) = translated.translate(&body)?;
        answer = format!("{translator:?}");
    }
    let request = match endpoint {
        "completions" => completion::parse(&body, &defaults),
        "generate" | "sampling_params" => generate::parse(&body, &defaults),
        _ => chat::parse(&body, &defaults),
    };
    Ok((request?, answer))
}

/// What Baton does with a field.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    Honoured,
    Refused,
    Ignored,
    /// It is named in the log.
    Unknown,
}

fn fate(endpoint: &str, name: &str) -> Fate {
    let plain = parse(endpoint, None).unwrap();
    let path = match endpoint {
        "sampling_params" => format!("sampling_params.{name}"),
        _ => name.to_owned(),
    };
    let values = [
        json!(true),
        json!(false),
        json!(1),
        json!(0.5),
        json!("x"),
        json!(["x"]),
        json!([1]),
        json!({"x": 1}),
    ];
    let (mut is_refused, mut is_unknown) = (false, false);
    for value in &values {
        match parse(endpoint, Some((name, value))) {
            Ok((request, _)) if request.unknown.contains(&path) => is_unknown = true,
            Ok(parsed) if parsed != plain => return Fate::Honoured,
            Ok(_) => {}
            Err(error) => {
                assert_eq!(error.status, 400, "{name}: {error}");
                match error.code.name() {
                    "unsupported_field" if error.param.as_deref() == Some(&path) => {
                        is_refused = true;
                    }
                    _ => return Fate::Honoured,
                }
            }
        }
    }
    match (is_refused, is_unknown) {
        (true, _) => Fate::Refused,
        (false, true) => Fate::Unknown,
        (false, false) => Fate::Ignored,
    }
}

/// Endpoints by field, as the recorded classes have them.
fn recorded() -> BTreeMap<String, BTreeSet<String>> {
    let text = include_str!("../goldens/fields.json");
    let lists: BTreeMap<String, Vec<String>> = serde_json::from_str(text).unwrap();
    let mut fields: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (list, names) in lists {
        let (_, endpoint) = list.split_once(' ').unwrap();
        for name in names {
            fields.entry(name).or_default().insert(endpoint.into());
        }
    }
    fields
}

/// The values of a refused field that are accepted, by endpoint.
fn accepted(name: &str) -> Vec<String> {
    [
        ("", peer_fields::REFUSED),
        (" in chat", chat::REFUSED),
        (" in completions", completion::REFUSED),
        (" in generate", generate::REFUSED),
    ]
    .into_iter()
    .filter_map(|(place, list)| {
        let (_, values) = list.iter().find(|(own, values)| *own == name && !values.is_empty())?;
        let values: Vec<String> = values.iter().map(|value| format!("`{value}`")).collect();
        Some(format!("accepted{place}: {}", values.join(", ")))
    })
    .collect()
}

fn page() -> String {
    let mut page = String::from(
        "# Fields of requests\n\nThis page is generated from the request classes of vLLM 0.32 and \
         SGLang 0.5.23, and from\ncommon fields of llama.cpp. It says what Baton does with each \
         field. The HTTP API\n([openai.md](openai.md)) has the types and ranges. `params` is \
         `sampling_params` of `/generate`.\n`responses` and `messages` are `/v1/responses` and \
         `/v1/messages`.\n\n- *yes*: the field has its effect.\n- *no*: a value \
         with an effect gets 400 `unsupported_field`. The note has the values without one.\n- \
         *ignored*: the field has no effect, for the reason in the note.\n- *-*: the field belongs \
         to none of these engines at this endpoint. It is ignored, and the log\n  names it.\n\n\
         | Field | chat | completions | generate | params | responses | messages | Note \
         |\n|---|---|---|---|---|---|---|---|\n",
    );
    let mut strays = Vec::new();
    for (name, endpoints) in recorded() {
        let fates = ENDPOINTS.map(|endpoint| fate(endpoint, &name));
        let cells = fates.iter().zip(ENDPOINTS).map(|(fate, endpoint)| match fate {
            Fate::Honoured => "yes",
            Fate::Refused => "no",
            Fate::Ignored => "ignored",
            Fate::Unknown => {
                if endpoints.contains(endpoint) {
                    strays.push(format!("{endpoint} does not know {name}"));
                }
                "-"
            }
        });
        let cells: Vec<&str> = cells.collect();
        let mut notes = Vec::new();
        if fates.contains(&Fate::Refused) {
            notes.extend(accepted(&name));
        }
        if fates.contains(&Fate::Ignored) {
            let reason = peer_fields::IGNORED.iter().find(|(own, _)| *own == name);
            match reason {
                Some((_, why)) => notes.push((*why).into()),
                None => strays.push(format!("{name} is ignored in silence: {fates:?}")),
            }
        }
        let _ = writeln!(page, "| `{name}` | {} | {} |", cells.join(" | "), notes.join("; "));
    }
    assert!(strays.is_empty(), "{}", strays.join("\n"));
    page
}

#[test]
fn the_page_of_fields_is_that_of_the_code() {
    let page = page();
    let path = std::path::Path::new(super::ROOT).join(PAGE);
    if std::env::var_os("BATON_WRITE_DOCS").is_some() {
        std::fs::write(path, page).unwrap();
        return;
    }
    assert_eq!(super::read(PAGE), page, "BATON_WRITE_DOCS=1 writes {PAGE} again");
}
