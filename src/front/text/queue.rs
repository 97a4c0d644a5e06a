//! Who waits for a tokeniser: a long prompt takes milliseconds, the longest body that is taken seconds, which would stall
//! every stream and every link if `ctl` did it, and every short prompt if one thread did all.
//!
//! Threads: `tok` works on what is short, `tok-long` on the rest; `ctl` asks. Bounded: a full queue refuses the request.
//! Invariants: what nobody waits for any more is not begun, and left between two texts; a panic on a text is the end of
//! its request alone.

use super::{Answer, Job, Made, Task, Text};
use crate::front::openai::ApiError;
use crate::limits::TOKENISE_SHORT;
use crate::stdx::bell::Bell;
use crossbeam_channel::{Receiver, Sender, TrySendError};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};

/// Says, while it is there, that somebody waits for a job.
#[derive(Debug)]
pub struct Ticket(#[expect(dead_code, reason = "its count is what is read")] Arc<()>);

/// `ctl`'s end.
#[derive(Debug)]
pub struct TextQueue {
    short: Sender<Entry>,
    long: Sender<Entry>,
    done: Receiver<Answer>,
}

#[derive(Debug)]
struct Entry {
    job: Job,
    waits: Weak<()>,
}

type Work = dyn Fn(Task, &dyn Fn() -> bool) -> Result<Made, ApiError> + Send + Sync;

impl TextQueue {
    /// Starts the threads. At most `capacity` jobs wait for each; `ctl` is rung for each answer.
    ///
    /// # Errors
    /// The system has no thread for it.
    pub fn start(text: Arc<Text>, capacity: usize, ctl: Arc<Bell>) -> io::Result<TextQueue> {
        TextQueue::over(Arc::new(move |task, is_wanted| text.work(task, is_wanted)), capacity, ctl)
    }

    fn over(work: Arc<Work>, capacity: usize, ctl: Arc<Bell>) -> io::Result<TextQueue> {
        let (answers, done) = crossbeam_channel::bounded(2 * capacity);
        let lane = |name: &str| {
            let (entries, queue) = crossbeam_channel::bounded::<Entry>(capacity);
            let (work, answers, ctl) = (work.clone(), answers.clone(), ctl.clone());
            let run = move || {
                // Its threads end with the queue.
                let _ = queue.iter().try_for_each(|entry| answer(&*work, entry, &answers, &ctl));
            };
            std::thread::Builder::new().name(name.into()).spawn(run).map(|_| entries)
        };
        Ok(TextQueue { short: lane("tok")?, long: lane("tok-long")?, done })
    }

    /// Queues a job, or refuses it. It is done while the ticket is there.
    ///
    /// # Errors
    /// Too many wait.
    pub fn submit(&self, job: Job) -> Result<Ticket, ApiError> {
        let ticket = Arc::new(());
        let lane = if job.task.size() <= TOKENISE_SHORT { &self.short } else { &self.long };
        lane.try_send(Entry { job, waits: Arc::downgrade(&ticket) }).map_err(
            |error| match error {
                TrySendError::Full(_) => {
                    let most = lane.capacity().unwrap_or(0);
                    ApiError::busy(format!(
                        "{most} requests wait to be tokenised, as many as may; try again later"
                    ))
                }
                TrySendError::Disconnected(_) => {
                    ApiError::new(500, "internal", "the tokeniser has stopped")
                }
            },
        )?;
        Ok(Ticket(ticket))
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

/// Does a job, if it is wanted, and tells what came of it; an error where nobody listens any more.
fn answer(work: &Work, entry: Entry, answers: &Sender<Answer>, ctl: &Bell) -> Result<(), ()> {
    let Entry { job, waits } = entry;
    let is_wanted = || waits.strong_count() > 0;
    if !is_wanted() {
        return Ok(());
    }
    // Nothing is changed by a job, so nothing is left half changed.
    let made = catch_unwind(AssertUnwindSafe(|| work(job.task, &is_wanted)));
    let made = made
        .unwrap_or_else(|_| Err(ApiError::new(500, "internal", "the text could not be tokenised")));
    answers.send(Answer { id: job.id, made }).map_err(|_| ())?;
    ctl.ring();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::front::openai::tokenize::DetokenizeRequest;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    fn queue(work: impl Fn(Task) -> Result<Made, ApiError> + Send + Sync + 'static) -> TextQueue {
        TextQueue::over(
            Arc::new(move |task, _: &dyn Fn() -> bool| work(task)),
            4,
            Arc::new(Bell::new(|| {})),
        )
        .unwrap()
    }

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

    fn job(id: u64, tokens: usize) -> Job {
        Job {
            id,
            task: Task::Detokenize(DetokenizeRequest { model: None, tokens: vec![1; tokens] }),
        }
    }

    #[test]
    fn a_panic_ends_its_request_and_not_the_thread() {
        let queue = queue(|task| match task {
            Task::Detokenize(asked) if asked.tokens.is_empty() => panic!("a fault in a tokeniser"),
            _ => Ok(Made::Body(b"well".to_vec())),
        });
        let _tickets = [queue.submit(job(0, 0)).unwrap(), queue.submit(job(7, 1)).unwrap()];
        let failed = answer(&queue);
        assert_eq!((failed.id, failed.made.unwrap_err().status), (0, 500));
        let well = answer(&queue);
        assert!(well.id == 7 && matches!(well.made, Ok(Made::Body(body)) if body == b"well"));
    }

    #[test]
    fn a_short_text_does_not_wait_for_a_long_one() {
        let (open, gate) = crossbeam_channel::bounded::<()>(0);
        let queue = queue(move |task| {
            if task.size() > TOKENISE_SHORT {
                gate.recv().unwrap();
            }
            Ok(Made::Body(Vec::new()))
        });
        let _tickets = [
            queue.submit(job(0, TOKENISE_SHORT + 1)).unwrap(),
            queue.submit(job(1, TOKENISE_SHORT)).unwrap(),
        ];
        assert_eq!(answer(&queue).id, 1);
        open.send(()).unwrap();
        assert_eq!(answer(&queue).id, 0);
    }

    #[test]
    fn what_nobody_waits_for_is_not_begun() {
        let (open, gate) = crossbeam_channel::bounded::<()>(0);
        let begun = Arc::new(AtomicUsize::new(0));
        let count = begun.clone();
        let queue = queue(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            gate.recv().unwrap();
            Ok(Made::Body(Vec::new()))
        });
        let first = queue.submit(job(0, 1)).unwrap();
        while begun.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        let second = queue.submit(job(1, 1)).unwrap();
        let _third = queue.submit(job(2, 1)).unwrap();
        drop((first, second));
        (0..2).for_each(|_| open.send(()).unwrap());
        assert_eq!([answer(&queue).id, answer(&queue).id], [0, 2]);
        assert_eq!(begun.load(Ordering::Relaxed), 2);
    }
}
