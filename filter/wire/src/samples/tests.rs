use super::*;

fn samples() -> Samples {
    Samples {
        stamp: Stamp {
            version: WIRE_VERSION,
            agent: "node-1".to_owned(),
            epoch: 3,
            sequence: 9,
        },
        topology_sequence: 2,
        pods: vec![
            PodSample {
                ordinal: 0,
                age_ms: 5,
                running: Some(0.0),
                ..PodSample::default()
            },
            PodSample {
                ordinal: 7,
                age_ms: 6,
                remote_decode_tokens: Some(1e9),
                ..PodSample::default()
            },
        ],
    }
}

#[test]
fn absent_numbers_stay_absent_and_zero_stays_zero() {
    assert_eq!(Samples::decode(&samples().encode()).unwrap(), samples());
}

#[test]
fn pods_are_written_in_the_order_of_their_ordinals() {
    let mut reversed = samples();
    reversed.pods.reverse();
    assert_eq!(reversed.encode(), samples().encode());
}

#[test]
fn a_message_cut_anywhere_says_where() {
    let bytes = samples().encode();
    for len in 0..bytes.len() {
        let error = Samples::decode(&bytes[..len]).unwrap_err();
        let cut = matches!(error, SamplesError::Magic | SamplesError::Truncated(_));
        assert!(cut, "{len} bytes: {error}");
    }
    let mut longer = bytes;
    longer.push(0);
    assert_eq!(Samples::decode(&longer), Err(SamplesError::Trailing(1)));
}

#[test]
fn a_number_that_is_not_finite_is_named() {
    for number in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let mut samples = samples();
        samples.pods[1].kv_usage = Some(number);
        let error = Samples::decode(&samples.encode()).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("pods[1].kv_usage: {number} is not a finite number")
        );
    }
}

#[test]
fn an_ordinal_that_comes_twice_is_refused() {
    let mut samples = samples();
    samples.pods[1].ordinal = 0;
    let error = Samples::decode(&samples.encode()).unwrap_err();
    assert!(
        error.to_string().starts_with("pods[1].ordinal: "),
        "{error}"
    );
}

#[test]
fn versions_and_limits_have_errors_of_their_own() {
    let mut newer = samples().encode();
    newer[3] = 2;
    newer.truncate(4);
    assert_eq!(
        Samples::decode(&newer),
        Err(SamplesError::Version { found: 2 })
    );

    let mut many = samples();
    many.pods = (0..=8192)
        .map(|ordinal| PodSample {
            ordinal,
            ..PodSample::default()
        })
        .collect();
    let error = Samples::decode(&many.encode()).unwrap_err();
    assert!(
        matches!(
            error,
            SamplesError::TooLarge {
                found: 8193,
                limit: MAX_PODS,
                ..
            }
        ),
        "{error}"
    );

    let mut nobody = samples();
    nobody.stamp.agent.clear();
    assert!(matches!(
        Samples::decode(&nobody.encode()),
        Err(SamplesError::Invalid { .. })
    ));
}
