//! Who asks for what, and when: drawn from a seed before the simulation starts, so that every
//! policy gets the same work.

use crate::engine::Micros;
use pd_core::ids::Ids;

/// Tokens with one origin: a system prompt, or what was said in a conversation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    /// Equal ids have equal text.
    pub(crate) id: u64,
    /// Length.
    pub(crate) tokens: u64,
}

/// A conversation; a single request is one with a single turn.
pub(crate) struct Session {
    /// When its first turn arrives.
    pub(crate) at: Micros,
    /// What its prompts begin with.
    pub(crate) system: Segment,
    /// Name of the rest of its prompts.
    pub(crate) id: u64,
    pub(crate) turns: Vec<Turn>,
}

/// One request of a conversation.
pub(crate) struct Turn {
    /// Time between the answer before and this question.
    pub(crate) pause: Micros,
    /// Length of the question.
    pub(crate) question: u64,
    /// Length of the answer.
    pub(crate) answer: u64,
}

/// A source of random numbers of the usual distributions.
pub(crate) struct Dice(Ids);

// === impl Session ===

impl Session {
    /// What a turn sends: everything said before and the new question.
    pub(crate) fn prompt(&self, turn: usize) -> Vec<Segment> {
        let said: u64 = self.turns[..turn]
            .iter()
            .map(|turn| turn.question + turn.answer)
            .sum();
        let talk = Segment {
            id: self.id,
            tokens: said + self.turns[turn].question,
        };
        let system = Some(self.system).filter(|system| system.tokens > 0);
        system.into_iter().chain([talk]).collect()
    }
}

/// Single requests, Poisson at `rate` a second, of the lengths that `length` draws for a time.
pub(crate) fn single(
    dice: &mut Dice,
    rate: f64,
    seconds: u64,
    mut length: impl FnMut(&mut Dice, Micros) -> u64,
) -> Vec<Session> {
    arrivals(dice, rate, seconds, |dice, at, id| Session {
        at,
        system: Segment { id: 0, tokens: 0 },
        id,
        turns: vec![Turn {
            pause: 0,
            question: length(dice, at),
            answer: dice.between(50, 250),
        }],
    })
}

/// Conversations, Poisson at `rate` a second: one of a few system prompts, several turns that
/// each send all that was said before, and pauses to read and type.
pub(crate) fn conversations(dice: &mut Dice, rate: f64, seconds: u64) -> Vec<Session> {
    arrivals(dice, rate, seconds, |dice, at, id| {
        let app = dice.between(1, 4);
        let mut turns = Vec::new();
        while turns.len() < 12 && (turns.is_empty() || dice.chance(0.85)) {
            turns.push(Turn {
                pause: (dice.exponential(8.0) * 1e6) as Micros,
                question: if dice.chance(0.15) {
                    dice.between(3_000, 8_000)
                } else {
                    dice.between(50, 600)
                },
                answer: dice.between(100, 400),
            });
        }
        Session {
            at,
            system: Segment {
                id: u64::MAX - app,
                tokens: 500 * app,
            },
            id,
            turns,
        }
    })
}

fn arrivals(
    dice: &mut Dice,
    rate: f64,
    seconds: u64,
    mut session: impl FnMut(&mut Dice, Micros, u64) -> Session,
) -> Vec<Session> {
    let (mut at, mut sessions) = (0.0, Vec::new());
    loop {
        at += dice.exponential(1.0 / rate);
        if at > seconds as f64 {
            return sessions;
        }
        let id = sessions.len() as u64;
        sessions.push(session(dice, (at * 1e6) as Micros, id));
    }
}

// === impl Dice ===

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        let mut bytes = [0x5a; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        Self(Ids::new(bytes))
    }

    /// Uniform in 0..1.
    fn unit(&mut self) -> f64 {
        (self.0.word() >> 11) as f64 / (1_u64 << 53) as f64
    }

    pub(crate) fn chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    /// Uniform, both ends included.
    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.0.word() % (high - low + 1)
    }

    /// Evenly spread over the orders of magnitude between two lengths.
    pub(crate) fn log_between(&mut self, low: f64, high: f64) -> u64 {
        (low * (high / low).powf(self.unit())) as u64
    }

    pub(crate) fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }
}
