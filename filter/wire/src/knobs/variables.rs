//! Settings from environment variables.

use super::{KNOBS, Knob, Knobs, Mistake, Reader};

/// What was wrong with the variables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Variables {
    /// Bad values; the default stands.
    pub warnings: Vec<Mistake>,
    /// Bad values that must not be replaced by a default: the program must not go on.
    pub refused: Vec<Mistake>,
}

impl Knobs {
    /// Sets the knobs of `reader` that have a variable and that no stronger source has set
    /// (`is_given`, by name). A variable that is set but empty counts as not set.
    pub fn apply_variables(
        &mut self,
        reader: Reader,
        is_given: impl Fn(&str) -> bool,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Variables {
        let mut wrong = Variables::default();
        for knob in KNOBS
            .iter()
            .filter(|k| k.reader == reader && !is_given(k.name))
        {
            let Some(name) = knob.variable else { continue };
            let Some(text) = variable(name).filter(|text| !text.trim().is_empty()) else {
                continue;
            };
            match knob.kind.parse_text(&text) {
                Some(value) => {
                    self.set(knob.name, &value);
                }
                None if refuses(knob, &text) => wrong.refused.push(Mistake::of(knob, name, &text)),
                None => wrong.warnings.push(Mistake::of(knob, name, &text)),
            }
        }
        wrong
    }
}

/// A machine id that does not fit cannot become 0: two Envoys would draw the same request ids.
/// Ids that are no number or negative become 0, as in AIBrix.
fn refuses(knob: &Knob, text: &str) -> bool {
    knob.name == "trtMachineId" && text.trim().parse::<f64>().is_ok_and(|n| n >= 1024.0)
}
