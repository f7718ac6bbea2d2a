//! Vocabulary and merges, read element by element: a document tree of half a million entries
//! would take several times the memory.

/// A map from token to number, as pairs.
pub(super) mod tokens {
    use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};
    use serde::ser::Serializer;
    use std::fmt;

    pub(in crate::tokenizer) fn serialize<S: Serializer>(
        tokens: &[(String, u32)],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_map(tokens.iter().map(|(token, id)| (token, id)))
    }

    pub(in crate::tokenizer) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<(String, u32)>, D::Error> {
        struct Tokens;

        impl<'de> Visitor<'de> for Tokens {
            type Value = Vec<(String, u32)>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map from token to number")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut tokens = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    tokens.push(entry);
                }
                Ok(tokens)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, _: A) -> Result<Self::Value, A::Error> {
                Err(A::Error::custom(
                    "a list as vocabulary: only models of type BPE are counted with, not Unigram",
                ))
            }
        }

        deserializer.deserialize_any(Tokens)
    }
}

/// Pairs, each as `"left right"` or, in newer files, as `["left", "right"]`.
pub(super) mod merges {
    use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};
    use serde::ser::{SerializeSeq, Serializer};
    use std::fmt;

    pub(in crate::tokenizer) fn serialize<S: Serializer>(
        merges: &[(String, String)],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(merges.len()))?;
        for (left, right) in merges {
            // The shorter form, where it says the same.
            if left.contains(' ') || right.contains(' ') || left.starts_with("#version") {
                list.serialize_element(&(left, right))?;
            } else {
                list.serialize_element(&format_args!("{left} {right}"))?;
            }
        }
        list.end()
    }

    pub(in crate::tokenizer) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<(String, String)>, D::Error> {
        struct Pairs;

        impl<'de> Visitor<'de> for Pairs {
            type Value = Vec<(String, String)>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of merges")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut pairs = Vec::new();
                while let Some(entry) = seq.next_element::<Entry>()? {
                    pairs.extend(entry.0);
                }
                Ok(pairs)
            }
        }

        deserializer.deserialize_seq(Pairs)
    }

    /// A pair, or the version line that some files begin with.
    struct Entry(Option<(String, String)>);

    impl<'de> Deserialize<'de> for Entry {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            struct Pair;

            impl<'de> Visitor<'de> for Pair {
                type Value = Entry;

                fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    f.write_str("a merge of two parts")
                }

                fn visit_str<E: Error>(self, text: &str) -> Result<Entry, E> {
                    if text.starts_with("#version") {
                        return Ok(Entry(None));
                    }
                    match text.split_once(' ') {
                        Some((left, right)) if !right.contains(' ') => {
                            Ok(Entry(Some((left.to_owned(), right.to_owned()))))
                        }
                        _ => Err(E::custom("a merge is not of two parts")),
                    }
                }

                fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Entry, A::Error> {
                    let missing = || A::Error::custom("a merge is not of two parts");
                    let left = seq.next_element()?.ok_or_else(missing)?;
                    let right = seq.next_element()?.ok_or_else(missing)?;
                    match seq.next_element::<String>()? {
                        None => Ok(Entry(Some((left, right)))),
                        Some(_) => Err(missing()),
                    }
                }
            }

            deserializer.deserialize_any(Pair)
        }
    }
}
