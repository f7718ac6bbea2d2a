use super::*;

const PARAMS_OF_1: &str = r#"{"request_type":"context_only","first_gen_tokens":[7],"first_gen_logits":null,"ctx_request_id":9223372036854775807,"encoded_opaque_state":"9223372036854775807@tcp:\/\/h:1\/a", "disagg_request_id":9223372036854775807,"schedule_style":0}"#;

fn members(reply: &str) -> String {
    match hand_over(reply.as_bytes()) {
        HandOver::Members(members) => String::from_utf8(members).unwrap(),
        other => panic!("{other:?} for {reply}"),
    }
}

#[test]
fn only_the_request_type_changes_and_63_bits_stay_exact() {
    let expected = format!("\"disaggregated_params\":{PARAMS_OF_1}")
        .replace("context_only", "generation_only");
    let in_choice = format!(
        r#"{{"id":"x","choices":[{{"index":0,"disaggregated_params":{PARAMS_OF_1}}},{{"disaggregated_params":{{}}}}],"prompt_token_ids":[1, 2]}}"#
    );
    assert_eq!(members(&in_choice), expected);
    assert_eq!(prompt_ids(in_choice.as_bytes()), Some(&b"[1, 2]"[..]));
    let on_top = format!(r#"{{"disaggregated_params": {PARAMS_OF_1} ,"choices":[{{}}]}}"#);
    assert_eq!(members(&on_top), expected);
    assert_eq!(prompt_ids(on_top.as_bytes()), None);
    let no_type = r#"{"disaggregated_params":{"ctx_request_id":1,"first_gen_tokens":[]}}"#;
    assert_eq!(
        members(no_type),
        r#""disaggregated_params":{"request_type":"generation_only","ctx_request_id":1,"first_gen_tokens":[]}"#
    );
}

#[test]
fn what_no_generation_worker_can_use_is_not_passed_on() {
    for (reply, reason) in [
        (r#"{"choices":[]}"#, Unusable::NoContext),
        (
            r#"{"choices":[{}],"prompt_token_ids":[1]}"#,
            Unusable::NoContext,
        ),
        (
            r#"{"disaggregated_params":null,"choices":[{"disaggregated_params":{}}]}"#,
            Unusable::NoContext,
        ),
        (r#"{"disaggregated_params":[]}"#, Unusable::NotAnObject),
        (r#"{"disaggregated_params":{}}"#, Unusable::ContextId),
        (
            r#"{"disaggregated_params":{"ctx_request_id":1.5e3,"first_gen_tokens":[1]}}"#,
            Unusable::ContextId,
        ),
        (
            r#"{"disaggregated_params":{"ctx_request_id":9223372036854775808,"first_gen_tokens":[1]}}"#,
            Unusable::ContextId,
        ),
        (
            r#"{"disaggregated_params":{"ctx_request_id":1,"first_gen_tokens":null}}"#,
            Unusable::FirstTokens,
        ),
        (
            r#"{"disaggregated_params":{"ctx_request_id":1,"ctx_request_id":2,"first_gen_tokens":[]}}"#,
            Unusable::Repeated,
        ),
    ] {
        let out = hand_over(reply.as_bytes());
        assert_eq!(out, HandOver::Unusable(reason), "{reply}");
    }
    for reply in ["", "[]", "null", "{\"choices\":", "{} x"] {
        assert_eq!(
            hand_over(reply.as_bytes()),
            HandOver::NotAnObject,
            "{reply}"
        );
    }
    for reply in [
        r#"{"prompt_token_ids":null}"#,
        r#"{"choices":[{"prompt_token_ids":[1]}]}"#,
        "x",
    ] {
        assert_eq!(prompt_ids(reply.as_bytes()), None, "{reply}");
    }
}

#[test]
fn a_context_worker_is_known_by_one_place_and_a_rank() {
    let info = r#"{"disaggregated_params":{"ctx_dp_rank":3,"ctx_info_endpoint":["tcp://h:1\/a"]}}"#;
    let worker = ContextWorker::read(info.as_bytes()).unwrap();
    assert_eq!(
        String::from_utf8(worker.decode_members(u64::MAX >> 1)).unwrap(),
        r#""disaggregated_params":{"request_type":"generation_only","disagg_request_id":9223372036854775807,"ctx_request_id":9223372036854775807,"schedule_style":1,"ctx_dp_rank":3,"ctx_info_endpoint":"tcp://h:1\/a"}"#
    );
    let info = r#"{"x":1,"disaggregated_params":{"encoded_opaque_state":"s","ctx_dp_rank":0,"ctx_info_endpoint":"e"}}"#;
    let worker = ContextWorker::read(info.as_bytes()).unwrap();
    let members = String::from_utf8(worker.decode_members(1)).unwrap();
    assert!(
        members.ends_with(r#","encoded_opaque_state":"s"}"#),
        "{members}"
    );
}

#[test]
fn a_worker_without_the_python_transceiver_is_told_apart() {
    let read = |info: &str| ContextWorker::read(info.as_bytes()).unwrap_err();
    let empty = read(r#"{"disaggregated_params":{}}"#);
    assert_eq!(empty, NoContextWorker::Empty);
    assert!(empty.to_string().contains("transceiver_runtime: PYTHON"));
    for (info, reason) in [
        ("{}", NoContextWorker::NoParams),
        ("x", NoContextWorker::NoParams),
        (
            r#"{"disaggregated_params":null}"#,
            NoContextWorker::NoParams,
        ),
        (
            r#"{"disaggregated_params":{"ctx_dp_rank":0}}"#,
            NoContextWorker::Endpoint,
        ),
        (
            r#"{"disaggregated_params":{"ctx_dp_rank":0,"ctx_info_endpoint":["a","b"]}}"#,
            NoContextWorker::Endpoint,
        ),
        (
            r#"{"disaggregated_params":{"ctx_dp_rank":0,"ctx_info_endpoint":""}}"#,
            NoContextWorker::Endpoint,
        ),
        (
            r#"{"disaggregated_params":{"ctx_info_endpoint":"a"}}"#,
            NoContextWorker::Rank,
        ),
        (
            r#"{"disaggregated_params":{"ctx_dp_rank":-1,"ctx_info_endpoint":"a"}}"#,
            NoContextWorker::Rank,
        ),
        (
            r#"{"disaggregated_params":{"ctx_dp_rank":0,"ctx_info_endpoint":"a","encoded_opaque_state":1}}"#,
            NoContextWorker::State,
        ),
    ] {
        assert_eq!(read(info), reason, "{info}");
    }
}
