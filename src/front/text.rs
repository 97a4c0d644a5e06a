//! Text to ids and back, on a thread of its own: a long prompt takes milliseconds to tokenise, the longest
//! body that is taken seconds, which would stall every stream and every link if `ctl` did it.
//!
//! Thread: `tok` works, `ctl` asks. Bounded: a full queue refuses the request. A panic on a text is the end
//! of its request alone.

use crate::front::openai::request::Conversation;
use crate::front::openai::tokenize::{
    DetokenizeAnswer, DetokenizeRequest, Subject, TokenizeAnswer, TokenizeRequest,
};
use crate::front::openai::{ApiError, Endpoint, Prompts};
use crate::model::chat::{self, ChatTemplate};
use crate::model::tokenizer::Tokenizer;
use crate::stdx::bell::Bell;
use crossbeam_channel::{Receiver, Sender, TrySendError};
use serde::Serialize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::SystemTime;

/// What turns text into ids and back.
#[derive(Debug)]
pub struct Text {
    /// The vocabulary.
    pub tokenizer: Tokenizer,
    /// The model's chat template, where it has one.
    pub chat: Option<ChatTemplate>,
}

/// Something to do.
#[derive(Debug)]
pub struct Job {
    /// Names the answer.
    pub id: u64,
    /// What to do.
    pub task: Task,
}

/// What is to be done.
#[derive(Debug)]
pub enum Task {
    /// Prompts to tokenise; the endpoint decides the name of the field at fault.
    Prompts(Prompts, Endpoint),
    /// A text or conversation whose ids are the answer.
    Tokenize {
        /// What was asked.
        asked: TokenizeRequest,
        /// Tokens of the context, which the answer tells.
        context: usize,
    },
    /// Ids whose text is the answer.
    Detokenize(DetokenizeRequest),
}

/// What has come of a job.
#[derive(Debug)]
pub struct Answer {
    /// Of the job.
    pub id: u64,
    /// What it was asked for, or why there is none.
    pub made: Result<Made, ApiError>,
}

/// What a task makes.
#[derive(Debug)]
pub enum Made {
    /// Of prompts the ids, one list each; and the prompts back, for those that are echoed.
    Ids(Prompts, Vec<Vec<u32>>),
    /// Of the others the answer's body, as JSON.
    Body(Vec<u8>),
}

/// `ctl`'s end.
#[derive(Debug)]
pub struct TextQueue {
    jobs: Sender<Job>,
    done: Receiver<Answer>,
}

impl TextQueue {
    /// Starts the thread. At most `capacity` jobs wait; `ctl` is rung for each answer.
    pub fn start(text: Arc<Text>, capacity: usize, ctl: Arc<Bell>) -> std::io::Result<TextQueue> {
        TextQueue::over(move |task| text.work(task), capacity, ctl)
    }

    fn over(
        mut work: impl FnMut(Task) -> Result<Made, ApiError> + Send + 'static,
        capacity: usize,
        ctl: Arc<Bell>,
    ) -> std::io::Result<TextQueue> {
        let (jobs, queue) = crossbeam_channel::bounded::<Job>(capacity);
        let (answers, done) = crossbeam_channel::bounded(capacity);
        std::thread::Builder::new().name("tok".into()).spawn(move || {
            for job in queue {
                // Nothing is changed by a job, so nothing is left half changed.
                let made = catch_unwind(AssertUnwindSafe(|| work(job.task)));
                let made = made.unwrap_or_else(|_| {
                    Err(ApiError::new(500, "internal", "the text could not be tokenised"))
                });
                if answers.send(Answer { id: job.id, made }).is_err() {
                    return;
                }
                ctl.ring();
            }
        })?;
        Ok(TextQueue { jobs, done })
    }

    /// Queues a job, or refuses it.
    pub fn submit(&self, job: Job) -> Result<(), ApiError> {
        self.jobs.try_send(job).map_err(|error| match error {
            TrySendError::Full(_) => ApiError::overloaded(1),
            TrySendError::Disconnected(_) => ApiError::new(500, "internal", "the tokeniser has stopped"),
        })
    }

    /// Whether an answer waits.
    pub fn has_news(&self) -> bool {
        !self.done.is_empty()
    }

    /// The next answer.
    pub fn poll(&self) -> Option<Answer> {
        self.done.try_recv().ok()
    }
}

impl Text {
    /// Does a task.
    fn work(&self, task: Task) -> Result<Made, ApiError> {
        match task {
            Task::Prompts(prompts, endpoint) => {
                let ids = self.ids(&prompts, endpoint)?;
                Ok(Made::Ids(prompts, ids))
            }
            Task::Tokenize { asked, context } => self.tokenize(&asked, context),
            Task::Detokenize(asked) => {
                let prompt = self.tokenizer.decode(&asked.tokens, false);
                body(&DetokenizeAnswer { prompt: &prompt })
            }
        }
    }

    fn tokenize(&self, asked: &TokenizeRequest, context: usize) -> Result<Made, ApiError> {
        let rendered;
        let source = match &asked.subject {
            Subject::Prompt(prompt) => prompt,
            Subject::Chat(conversation) => {
                rendered = self.render(conversation)?;
                &rendered
            }
        };
        let encoded = self.tokenizer.encode(source, asked.add_special_tokens);
        let tokens = encoded.map_err(|error| ApiError::invalid("prompt", error.to_string()))?;
        let text = |&token| self.tokenizer.token_text(token);
        let token_strs = asked.return_token_strs.then(|| tokens.iter().map(text).collect());
        body(&TokenizeAnswer { count: tokens.len(), max_model_len: context, tokens: &tokens, token_strs })
    }

    /// The ids of each prompt. Ids given as such are compared with the vocabulary.
    pub fn ids(&self, prompts: &Prompts, endpoint: Endpoint) -> Result<Vec<Vec<u32>>, ApiError> {
        let param = prompt_param(endpoint, prompts);
        let encode = |text: &str, special: bool| {
            self.tokenizer.encode(text, special).map_err(|error| ApiError::invalid(param, error.to_string()))
        };
        let lists = match prompts {
            Prompts::Texts(texts) => texts.iter().map(|text| encode(text, true)).collect(),
            Prompts::Ids(lists) => {
                let vocab = self.tokenizer.vocab_size();
                match lists.iter().flatten().find(|&&id| id as usize >= vocab) {
                    Some(id) => Err(ApiError::invalid(
                        param,
                        format!("holds the id {id}; the vocabulary has {vocab} ids"),
                    )),
                    None => Ok(lists.clone()),
                }
            }
            Prompts::Chat(conversation) => {
                self.render(conversation).and_then(|text| Ok(vec![encode(&text, false)?]))
            }
        }?;
        match lists.iter().any(Vec::is_empty) {
            true => Err(ApiError::invalid(param, "has no tokens")),
            false => Ok(lists),
        }
    }

    /// A conversation as the model's template writes it.
    pub fn render(&self, conversation: &Conversation) -> Result<String, ApiError> {
        let Some(template) = &self.chat else {
            let message = "this model has no chat template; use /v1/completions";
            return Err(ApiError::new(400, "no_chat_template", message));
        };
        let rendered = template.render(&chat::Conversation {
            messages: &conversation.messages,
            tools: None,
            variables: Some(&conversation.template_kwargs),
            add_generation_prompt: conversation.add_generation_prompt,
            now: SystemTime::now(),
        });
        rendered.map_err(|error| ApiError::invalid("messages", format!("do not fit the template: {error}")))
    }
}

fn body(answer: &impl Serialize) -> Result<Made, ApiError> {
    serde_json::to_vec(answer)
        .map(Made::Body)
        .map_err(|error| ApiError::new(500, "internal", error.to_string()))
}

/// The field that held the prompt.
pub fn prompt_param(endpoint: Endpoint, prompts: &Prompts) -> &'static str {
    match (endpoint, prompts) {
        (Endpoint::Completions, _) => "prompt",
        (Endpoint::Chat, _) => "messages",
        (Endpoint::Generate, Prompts::Ids(_)) => "input_ids",
        (Endpoint::Generate, _) => "text",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    fn answer(queue: &TextQueue) -> Answer {
        let begun = Instant::now();
        loop {
            if let Some(answer) = queue.poll() {
                return answer;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "no answer");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_panic_ends_its_request_and_not_the_thread() {
        let work = |task: Task| match task {
            Task::Detokenize(asked) if asked.tokens.is_empty() => panic!("a fault in a tokeniser"),
            _ => Ok(Made::Body(b"well".to_vec())),
        };
        let queue = TextQueue::over(work, 4, Arc::new(Bell::new(|| {}))).unwrap();
        let job = |id, tokens| Job { id, task: Task::Detokenize(DetokenizeRequest { model: None, tokens }) };
        queue.submit(job(0, vec![])).unwrap();
        let failed = answer(&queue);
        assert_eq!((failed.id, failed.made.unwrap_err().status), (0, 500));
        queue.submit(job(7, vec![1])).unwrap();
        let well = answer(&queue);
        assert!(well.id == 7 && matches!(well.made, Ok(Made::Body(body)) if body == b"well"));
    }

    #[test]
    fn a_template_that_cannot_be_evaluated_refuses_its_request() {
        let source = "{{ messages[1:][::-1] }}{{ raise_exception('never') if messages|length > 9 }}";
        let chat = ChatTemplate::new(source, Vec::new()).unwrap();
        let tokenizer = Tokenizer::from_hf(&crate::model::testing::fixture("llama-f32")).unwrap();
        let text = Text { tokenizer, chat: Some(chat) };
        let message = serde_json::json!({"role": "user", "content": "x"});
        let conversation = Conversation {
            messages: vec![message],
            add_generation_prompt: true,
            template_kwargs: serde_json::Map::new(),
        };
        let refused = text.render(&conversation).unwrap_err();
        assert_eq!((refused.status, refused.param.as_deref()), (400, Some("messages")));
    }
}
