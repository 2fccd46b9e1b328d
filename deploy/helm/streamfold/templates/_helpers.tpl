{{- define "streamfold.name" -}}
{{ printf "%s-streamfold" .Release.Name | trunc 52 | trimSuffix "-" }}
{{- end }}

{{- define "streamfold.selector" -}}
app.kubernetes.io/name: streamfold
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "streamfold.labels" -}}
{{ include "streamfold.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end }}
