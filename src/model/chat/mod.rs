//! Renders chat messages to prompt text with the Jinja template in the model's files. The text
//! equals that of transformers.
//!
//! Thread: `tok`.
//! Invariants: rendering reads no clock and no file. The output depends only on the input.
//! Not here: the message format of an API, tokenising the text.

mod json;
mod strftime;
mod tools;

pub use tools::describe_tools;

use crate::limits::TEMPLATE_STEPS_MAX;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind, State};
use serde_json::Value as Json;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// The input of a template.
#[derive(Clone, Copy, Debug)]
pub struct Conversation<'a> {
    /// Objects with `role` and `content`, passed through unchanged.
    pub messages: &'a [Json],
    /// Tools in OpenAI's format.
    pub tools: Option<&'a [Json]>,
    /// Further variables, such as `enable_thinking`. They override those of the model's files.
    pub variables: Option<&'a serde_json::Map<String, Json>>,
    /// Whether to end with the head of the assistant's answer.
    pub add_generation_prompt: bool,
    /// The time that `strftime_now` returns, since 1970-01-01 UTC.
    pub now: Duration,
}

/// A template cannot be used, or does not accept a conversation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ChatError {
    /// The model's files hold no template, as for a base model.
    Missing,
    /// The template raises an error about the conversation.
    Refused(String),
    /// The template has an error, or the conversation does not have the form that the template
    /// expects.
    Template(String),
}

impl fmt::Display for ChatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ChatError::Missing => write!(f, "the model has no chat template"),
            ChatError::Refused(why) => write!(f, "the chat template refuses the messages: {why}"),
            ChatError::Template(why) => write!(f, "the chat template fails: {why}"),
        }
    }
}

impl std::error::Error for ChatError {}

/// A compiled template and the special tokens that it can use.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    special: Vec<(String, String)>,
}

const NAME: &str = "chat_template";
const NOW: &str = "__now";
const REFUSED: &str = "\u{0}refused: ";

impl ChatTemplate {
    /// Compiles `source`; `special` are variables such as (`bos_token`, `<s>`).
    pub fn new(source: &str, special: Vec<(String, String)>) -> Result<ChatTemplate, ChatError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(explain)?);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", json::tojson);
        environment.add_template_owned(NAME, without_generation_tags(source)).map_err(explain)?;
        Ok(ChatTemplate { environment, source: source.to_owned(), special })
    }

    /// Compiles the template of a request. It has the special tokens of the model's own template,
    /// and [`TEMPLATE_STEPS_MAX`] steps.
    pub fn of_request(source: &str, own: Option<&ChatTemplate>) -> Result<ChatTemplate, ChatError> {
        let special = own.map_or(Vec::new(), |own| own.special.clone());
        let mut template = ChatTemplate::new(source, special)?;
        template.environment.set_fuel(Some(TEMPLATE_STEPS_MAX));
        Ok(template)
    }

    /// The template as in the model's files.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The text of a special token, such as `bos_token`.
    pub fn special(&self, name: &str) -> Option<&str> {
        let found = self.special.iter().find(|(known, _)| known == name);
        found.map(|(_, token)| token.as_str())
    }

    /// Whether it shows tools to the model.
    pub fn takes_tools(&self) -> bool {
        self.source.contains("tools")
    }

    /// The template and its special tokens as one text. Equal texts render equally.
    pub fn rules(&self) -> String {
        format!("{:?} {}", self.special, self.source)
    }

    /// Renders a conversation.
    pub fn render(&self, conversation: &Conversation<'_>) -> Result<String, ChatError> {
        let list = |items: &[Json]| items.iter().map(json::to_value).collect::<Value>();
        let seconds = conversation.now.as_secs();
        let given = [
            ("messages", list(conversation.messages)),
            ("tools", conversation.tools.map_or(Value::from(()), list)),
            ("documents", Value::from(())),
            ("add_generation_prompt", conversation.add_generation_prompt.into()),
            (NOW, seconds.into()),
        ];
        let special =
            self.special.iter().map(|(name, token)| (name.as_str(), Value::from(token.as_str())));
        let further = conversation.variables.into_iter().flatten();
        let further = further.map(|(name, value)| (name.as_str(), json::to_value(value)));
        let reserved = |name: &str| given.iter().any(|(taken, _)| *taken == name);
        let variables: Vec<_> = special
            .chain(further)
            .filter(|(name, _)| !reserved(name))
            .chain(given.clone())
            .collect();
        let template = self.environment.get_template(NAME).map_err(explain)?;
        let variables = Value::from_pairs(variables);
        // minijinja 3.0 panics at `[][::-1]`. Published templates evaluate it for an empty message
        // list.
        catch_unwind(AssertUnwindSafe(|| template.render(variables)))
            .unwrap_or_else(|_| {
                Err(Error::new(ErrorKind::InvalidOperation, "it cannot be evaluated"))
            })
            .map_err(explain)
    }
}

fn explain(error: Error) -> ChatError {
    match error.detail().and_then(|detail| detail.strip_prefix(REFUSED)) {
        Some(why) => ChatError::Refused(why.to_owned()),
        None => ChatError::Template(error.to_string()),
    }
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, format!("{REFUSED}{message}")))
}

fn strftime_now(state: &State, format: String) -> Result<String, Error> {
    let now = state.lookup(NOW).and_then(|now| now.as_i64()).unwrap_or(0);
    strftime::format(now as u64, &format).map_err(|specifier| {
        let what = format!("strftime_now does not know {specifier}");
        Error::new(ErrorKind::InvalidOperation, what)
    })
}

/// `{% generation %}` marks an answer for training and does not change the text. This function
/// makes it a condition that is always true, with the same whitespace control.
fn without_generation_tags(source: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(source.len()), source);
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else { break };
        let tag = &rest[start + 2..start + length];
        out.push_str(&rest[..start + 2]);
        match tag.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+') {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = &rest[start + length..];
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;
    use serde_json::json;

    #[derive(Deserialize)]
    struct Golden {
        name: String,
        template: String,
        messages: Vec<Json>,
        tools: Option<Vec<Json>>,
        add_generation_prompt: bool,
        variables: serde_json::Map<String, Json>,
        rendered: Option<String>,
        error: Option<String>,
    }

    fn conversation(messages: &[Json]) -> Conversation<'_> {
        Conversation {
            messages,
            tools: None,
            variables: None,
            add_generation_prompt: true,
            now: Duration::ZERO,
        }
    }

    #[test]
    fn renders_as_transformers_does() {
        let text = include_str!("../../../tests/goldens/chat.json");
        let goldens: Vec<Golden> = serde_json::from_str(text).unwrap();
        for golden in &goldens {
            let template = ChatTemplate::new(&golden.template, Vec::new()).unwrap();
            let rendered = template.render(&Conversation {
                tools: golden.tools.as_deref(),
                variables: Some(&golden.variables),
                add_generation_prompt: golden.add_generation_prompt,
                ..conversation(&golden.messages)
            });
            match (&golden.rendered, rendered) {
                // minijinja panics here; see `render`.
                (Some(_), Err(ChatError::Template(_))) if golden.name == "tools/empty" => {}
                (Some(expected), rendered) => {
                    assert_eq!(rendered.as_ref(), Ok(expected), "{}", golden.name)
                }
                (None, Err(ChatError::Refused(why))) => assert_eq!(Some(why), golden.error),
                (None, Err(ChatError::Template(_) | ChatError::Missing)) => {}
                (None, Ok(text)) => {
                    panic!("{}: rendered {text:?}, not {:?}", golden.name, golden.error)
                }
            }
        }
    }

    #[test]
    fn special_tokens_and_the_date_are_there() {
        let source = "{{ bos_token }}{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}";
        let special = vec![("bos_token".to_owned(), "<s>".to_owned())];
        let template = ChatTemplate::new(source, special).unwrap();
        let messages = [json!({"role": "user", "content": "x"})];
        assert_eq!(template.render(&conversation(&messages)).unwrap(), "<s>01 Jan 1970x");
        assert_eq!(template.source(), source);
    }

    #[test]
    fn variables_cannot_replace_the_messages() {
        let template =
            ChatTemplate::new("{{ messages | length }}{{ bos_token }}", Vec::new()).unwrap();
        let variables =
            serde_json::from_value(json!({"messages": [1, 2, 3], "bos_token": "b"})).unwrap();
        let request = Conversation { variables: Some(&variables), ..conversation(&[]) };
        assert_eq!(template.render(&request).unwrap(), "0b");
    }

    #[test]
    fn faults_are_told_apart() {
        let broken = ChatTemplate::new("{% if %}", Vec::new()).unwrap_err();
        assert!(matches!(broken, ChatError::Template(_)), "{broken}");
        let strict =
            ChatTemplate::new("{{ raise_exception('no ' ~ messages[0].role) }}", Vec::new())
                .unwrap();
        let messages = [json!({"role": "pirate"})];
        let refused = strict.render(&conversation(&messages)).unwrap_err();
        assert_eq!(refused, ChatError::Refused("no pirate".into()));
        let looping =
            ChatTemplate::new("{% set n = namespace() %}{% set n.n = n %}{{ n|tojson }}", vec![]);
        assert!(looping.unwrap().render(&conversation(&[])).is_err());
    }

    /// Runs on a stack as small as that of the thread `tok`.
    #[test]
    fn no_template_takes_the_process_with_it() {
        let deep = |open: &str, close: &str| {
            format!("{{{{ {}1{} }}}}", open.repeat(5000), close.repeat(5000))
        };
        let sources = [
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".to_owned(),
            "{% for x in [[1]] recursive %}{{ loop([[x]]) }}{% endfor %}".to_owned(),
            "{{ messages[::-1][::0] }}".to_owned(),
            "{{ [][::-1] }}{{ ''[::-1] }}{{ ()[::-1] }}".to_owned(),
            "{{ 'x' * 9999999999999 }}".to_owned(),
            "{{ 9223372036854775807 + 1 }}{{ -9223372036854775808 // -1 }}{{ 1 % 0 }}".to_owned(),
            "{{ strftime_now('%') }}{{ '%s'|format }}{{ 'x'.join(1) }}".to_owned(),
            deep("[", "]"),
            deep("(", ")"),
            deep("not ", ""),
            "{% if 1 %}".repeat(5000),
        ];
        let render = move || {
            for source in sources {
                if let Ok(template) = ChatTemplate::new(&source, Vec::new()) {
                    let _ = template.render(&conversation(&[]));
                }
            }
        };
        std::thread::Builder::new().stack_size(2 << 20).spawn(render).unwrap().join().unwrap();
    }
}
