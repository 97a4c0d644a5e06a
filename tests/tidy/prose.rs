//! The words of comments, logs, help and documents.

use super::source::Source;

/// Words that one reads twice, and what to write instead. They count in any case.
const BANNED: &[&str] = &[
    "is told",
    "are told",
    "was told",
    "were told",
    "be told",
    "been told",
    "comes to be",
    "is to be had",
    "are to be had",
    "what is to",
    "that one's",
    "but for",
    "nobody",
    "somebody",
];
/// Words that stand for people; a program is `it`.
const PEOPLE: &[&str] = &["who", "whom", "whose"];
/// Words of a sentence.
const SENTENCE_WORDS: usize = 25;

/// Lines in which a word for people stands for a program. Quotes of code (in backticks) are apart.
pub fn people(source: &Source) -> Vec<usize> {
    lines_with(source, |text| words(text).any(|word| PEOPLE.contains(&word)))
}

/// Lines with one of the [`BANNED`] words.
pub fn banned(source: &Source) -> Vec<usize> {
    lines_with(source, |text| {
        let text = format!(" {} ", words(text).collect::<Vec<_>>().join(" "));
        BANNED.iter().any(|banned| text.contains(&format!(" {banned} ")))
    })
}

fn lines_with(source: &Source, is_one: impl Fn(&str) -> bool) -> Vec<usize> {
    let mut is_code = false;
    let lines = source.prose.iter().filter(|(_, text)| {
        let is_fence = text.trim_start_matches(['/', '!', ' ']).starts_with("```");
        is_code ^= is_fence;
        !is_fence && !is_code && is_one(&without_code(text).to_lowercase())
    });
    lines.map(|&(line, _)| line).collect()
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    // An identifier is one word.
    let is_part = |c: char| c.is_alphanumeric() || matches!(c, '\'' | '_');
    text.split(move |c: char| !is_part(c)).filter(|word| !word.is_empty())
}

/// The text with spans in backticks replaced by one word.
fn without_code(text: &str) -> String {
    let parts = text.split('`').enumerate();
    parts.map(|(index, part)| if index % 2 == 0 { part } else { "code" }).collect()
}

/// Sentences of a document that are too long: line of the paragraph, and the first words. Tables,
/// headings, lists of links and code are apart.
pub fn long_sentences(source: &Source) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (line, paragraph) in paragraphs(&source.text) {
        for sentence in sentences(&without_code(&paragraph)) {
            let words: Vec<&str> = sentence
                .split_whitespace()
                .filter(|word| word.contains(char::is_alphanumeric))
                .collect();
            if words.len() > SENTENCE_WORDS {
                found.push((line, words[..6].join(" ")));
            }
        }
    }
    found
}

/// Paragraphs and items of lists, with the line that each begins on.
fn paragraphs(text: &str) -> Vec<(usize, String)> {
    let mut found: Vec<(usize, String)> = Vec::new();
    let (mut is_code, mut is_open) = (false, false);
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.starts_with("```") {
            is_code = !is_code;
            is_open = false;
            continue;
        }
        let is_item = line.starts_with("- ")
            || line.starts_with("* ")
            || line.split_once(". ").is_some_and(|(n, _)| n.parse::<u32>().is_ok());
        if is_code || line.is_empty() || line.starts_with(['|', '#', '<']) {
            is_open = false;
        } else if is_open && !is_item {
            let (_, paragraph) = found.last_mut().expect("one is open");
            paragraph.push(' ');
            paragraph.push_str(line);
        } else {
            found.push((index + 1, line.to_owned()));
            is_open = true;
        }
    }
    found
}

fn sentences(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut begin = 0;
    for (at, c) in text.char_indices() {
        let is_end = matches!(c, '.' | '!' | '?') && {
            let rest = text[at + 1..].trim_start_matches([')', '*', '"', '_']);
            rest.is_empty() || rest.starts_with(' ')
        };
        if is_end {
            found.push(&text[begin..=at]);
            begin = at + 1;
        }
    }
    found.push(&text[begin..]);
    found
}

#[test]
fn the_word_who_for_a_program_is_refused() {
    let text = "//! Who asks waits.\nfn who() {}\n/// `who` is code.\nlog(\"a peer whose key\");\n";
    assert_eq!(people(&Source::of_rust("src/a.rs", text)), [1, 4]);
}

#[test]
fn banned_words_are_refused() {
    let text =
        "It is\ntold so.\nThe caller is told.\nWhat is to be done, but\nfor one.\nNobody waits.\n";
    assert_eq!(banned(&Source::of_text("docs/a.md", text)), [3, 4, 6]);
}

#[test]
fn long_sentences_are_refused() {
    let long = "word ".repeat(SENTENCE_WORDS + 1);
    let text = format!(
        "# {long}\n\nShort. {long}\nmore of it.\n\n| {long} |\n\n\
         ```\n{long}\n```\n- {}.\n- `{long}`\n",
        "word ".repeat(SENTENCE_WORDS).trim()
    );
    let found = long_sentences(&Source::of_text("docs/a.md", &text));
    assert_eq!(found, [(3, "word word word word word word".to_owned())]);
}
