"""Encoders by the names of checkpoints. One class serves all heads: `ModelKind` says which there is."""

from __future__ import annotations

from mvllm.models.bert import Bert, DistilBert, Roberta


class BertModel(Bert):
    """`BertModel` of Hugging Face checkpoints."""


class BertForMaskedLM(Bert):
    """`BertForMaskedLM` of Hugging Face checkpoints."""


class BertForSequenceClassification(Bert):
    """`BertForSequenceClassification` of Hugging Face checkpoints."""


class RobertaModel(Roberta):
    """`RobertaModel` of Hugging Face checkpoints."""


class RobertaForMaskedLM(Roberta):
    """`RobertaForMaskedLM` of Hugging Face checkpoints."""


class RobertaForSequenceClassification(Roberta):
    """`RobertaForSequenceClassification` of Hugging Face checkpoints."""


class XLMRobertaModel(Roberta):
    """`XLMRobertaModel` of Hugging Face checkpoints."""


class XLMRobertaForMaskedLM(Roberta):
    """`XLMRobertaForMaskedLM` of Hugging Face checkpoints."""


class XLMRobertaForSequenceClassification(Roberta):
    """`XLMRobertaForSequenceClassification` of Hugging Face checkpoints."""


class DistilBertModel(DistilBert):
    """`DistilBertModel` of Hugging Face checkpoints."""


class DistilBertForMaskedLM(DistilBert):
    """`DistilBertForMaskedLM` of Hugging Face checkpoints."""


class DistilBertForSequenceClassification(DistilBert):
    """`DistilBertForSequenceClassification` of Hugging Face checkpoints."""
