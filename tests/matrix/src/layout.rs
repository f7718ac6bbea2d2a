//! The pods of a cell.

/// The pods of a cell's model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Layout {
    /// `r0-p0`, `r0-d0`.
    OnePair,
    /// `r0-p0`, `r0-d0` and `r1-p0`, `r1-d0`.
    TwoRolesets,
    /// `r0-p0`, `r0-d0` and `r0-d1`: one roleset with a second decode pod.
    TwoDecodes,
}

/// Phase a pod serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Prompts.
    Prefill,
    /// Tokens.
    Decode,
}

/// One pod of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodSpec {
    /// Name, unique in the cell.
    pub name: &'static str,
    /// Value of the roleset label.
    pub roleset: &'static str,
    /// Phase.
    pub role: Role,
}

// === impl Layout ===

impl Layout {
    /// The pods.
    #[must_use]
    pub fn pods(self) -> &'static [PodSpec] {
        const fn pod(name: &'static str, roleset: &'static str, role: Role) -> PodSpec {
            PodSpec {
                name,
                roleset,
                role,
            }
        }
        const D0: PodSpec = pod("r0-d0", "r0", Role::Decode);
        const P0: PodSpec = pod("r0-p0", "r0", Role::Prefill);
        const OTHER_D0: PodSpec = pod("r0-d1", "r0", Role::Decode);
        const D1: PodSpec = pod("r1-d0", "r1", Role::Decode);
        const P1: PodSpec = pod("r1-p0", "r1", Role::Prefill);
        match self {
            Self::OnePair => &[D0, P0],
            Self::TwoDecodes => &[D0, OTHER_D0, P0],
            Self::TwoRolesets => &[D0, P0, D1, P1],
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::OnePair => "",
            Self::TwoRolesets => "/two-rolesets",
            Self::TwoDecodes => "/two-decodes",
        }
    }
}
